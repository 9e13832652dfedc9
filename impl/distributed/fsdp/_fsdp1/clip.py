"""Joint norm of gradients that are sharded over groups of ranks, and scaling by it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.nn.utils.clip_grad import clip_grads_with_norm_, get_total_norm
from impl.optim._shards import UNSHARDED, Sharding, combine_norms

_EXCHANGED = torch.float64


def joint_norm(
    units: Sequence[Unit[FlatParamGroup]],
    full_grads: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """Return the norm of all gradients of `units` and of `full_grads`, each element counted once; 0-dim f64.

    Args:
        full_grads: full tensors, which every rank has.
    Collectives: those of `combine_norms`.
    """
    grads_by_sharding: dict[Sharding, list[Tensor]] = {UNSHARDED: [*full_grads]}
    for unit in units:
        for group in unit.param_groups:
            for groups, grads in group.gradients_by_groups():
                grads_by_sharding.setdefault(Sharding(groups), []).extend(grads)
    norms = {
        sharding: _norm(grads, norm_type, device)
        for sharding, grads in grads_by_sharding.items()
        if grads or sharding.groups
    }
    if not norms:
        return torch.zeros((), dtype=_EXCHANGED, device=device)
    joint, _ = combine_norms(norms, norm_type)
    return joint


def _norm(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm as 0-dim f64, because the ranks exchange it whatever their dtypes are."""
    present = [grad for grad in grads if grad.numel()]
    if not present:
        return torch.zeros((), dtype=_EXCHANGED, device=device)
    return get_total_norm(present, norm_type).to(device, _EXCHANGED)


def scale_grads(
    with_grads: Sequence[nn.Parameter], max_norm: float, norm: Tensor, foreach: bool | None
) -> torch.dtype:
    """Scale gradients in place so that a joint norm of `norm` becomes at most `max_norm`.

    Return the dtype that the gradients promote to, or f32 if there are none.
    """
    if not with_grads:
        return torch.float32
    clip_grads_with_norm_(with_grads, max_norm, norm, foreach)
    return reduce(torch.promote_types, (p.grad.dtype for p in with_grads if p.grad is not None))
