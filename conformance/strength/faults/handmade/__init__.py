"""Handmade faults by area, and the lookup of all faults by name."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.strength.faults import generated
from conformance.strength.faults.fault import REGISTERED, Fault
from conformance.strength.faults.handmade import (  # noqa: F401 registration of their faults
    amp_autocast_mode,
    amp_autocast_mode_functions,
    amp_autocast_mode_state,
    amp_autocast_operators,
    amp_grad_scaler_beyond_torch,
    amp_grad_scaler_state,
    amp_grad_scaler_step,
    amp_grad_scaler_unscale,
    amp_grad_scaler_update,
    distributed_fsdp_clip,
    distributed_fsdp_collectives,
    distributed_fsdp_constructor,
    distributed_fsdp_desync,
    distributed_fsdp_fully_shard,
    distributed_fsdp_gradients,
    distributed_fsdp_hooks,
    distributed_fsdp_optim_state,
    distributed_fsdp_sharded_grad_scaler,
    distributed_fsdp_state_dict,
    distributed_fsdp_summon,
    distributed_fsdp_wrap,
    distributed_fsdp_writes,
    dynamo_optimizer,
    nn_utils_clip_grad_dtensor,
    nn_utils_clip_grad_norm,
    nn_utils_clip_grad_orders,
    nn_utils_clip_grad_scaling,
)

HANDMADE: Mapping[str, Fault] = REGISTERED


def find(fault_id: str) -> Fault:
    """Return a fault by name, handmade or generated."""
    return HANDMADE[fault_id] if fault_id in HANDMADE else generated.find(fault_id)
