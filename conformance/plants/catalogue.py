"""Every fault by its name: the catalogue of bugs that real implementations had, and the generated ones."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.plants import (  # noqa: F401 to import an area is to enter its plants
    amp_autocast_mode,
    amp_autocast_mode_functions,
    amp_autocast_mode_state,
    amp_autocast_operators,
    amp_grad_scaler_fused_step,
    amp_grad_scaler_state,
    amp_grad_scaler_step,
    amp_grad_scaler_unscale,
    amp_grad_scaler_update,
    amp_older_spellings,
    distributed_fsdp_agreement,
    distributed_fsdp_clip,
    distributed_fsdp_collectives,
    distributed_fsdp_constructor,
    distributed_fsdp_gradients,
    distributed_fsdp_hollow,
    distributed_fsdp_hooks,
    distributed_fsdp_optim_state,
    distributed_fsdp_private_names,
    distributed_fsdp_sharded_grad_scaler,
    distributed_fsdp_state_dict,
    distributed_fsdp_summon,
    distributed_fsdp_wrap,
    distributed_fsdp_writes,
    dynamo_optimizer,
    generated,
    nn_utils_clip_grad_dtensor,
    nn_utils_clip_grad_norm,
    nn_utils_clip_grad_orders,
    nn_utils_clip_grad_scaling,
)
from conformance.plants.plant import ENTERED, Plant

CATALOGUE: Mapping[str, Plant] = ENTERED


def find(plant_id: str) -> Plant:
    """The fault of that name, from the catalogue or generated."""
    return CATALOGUE[plant_id] if plant_id in CATALOGUE else generated.find(plant_id)
