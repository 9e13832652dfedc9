"""The norm of gradients that are sharded over groups of ranks, and scaling them by it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.nn.utils.clip_grad import clip_grads_with_norm_, get_total_norm
from impl.optim._shards import all_gather_numbers

_EXCHANGED = torch.float64


def joint_norm(
    units: Sequence[Unit[FlatParamGroup]], others: Sequence[Tensor], norm_type: float, device: torch.device
) -> Tensor:
    """The norm of all gradients of `units`, each element counted once, with those in `others`; 0-dim f64.

    Args:
        others: tensors that every rank holds all of.
    Collectives: one all-gather of a number a rank for each group that gradients are sharded over; where tensor
        parallelism has spread some of them, for each set of groups one in each.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for unit in units:
        for group in unit.param_groups:
            for groups, grads in group.gradients_by_groups():
                by_groups.setdefault(groups, []).extend(grads)
    norms = [_norm(others, norm_type, device)] if others else []
    for groups, grads in by_groups.items():
        if grads or groups:
            norm = _norm(grads, norm_type, device)
            for group in groups:
                norm = torch.linalg.vector_norm(all_gather_numbers(norm.reshape(1), group), norm_type)
            norms.append(norm)
    return (
        torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if norms
        else torch.zeros((), dtype=_EXCHANGED, device=device)
    )


def _norm(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """0-dim f64, whatever each rank's dtypes are: the ranks exchange it."""
    present = [grad for grad in grads if grad.numel()]
    if not present:
        return torch.zeros((), dtype=_EXCHANGED, device=device)
    return get_total_norm(present, norm_type).to(device, _EXCHANGED)


def scale(
    with_grads: Sequence[nn.Parameter], max_norm: float, norm: Tensor, foreach: bool | None
) -> torch.dtype:
    """Scale gradients in place so that a joint norm of `norm` comes to at most `max_norm`; the dtype theirs promote to.

    f32 if there are none.
    """
    if not with_grads:
        return torch.float32
    clip_grads_with_norm_(with_grads, max_norm, norm, foreach)
    return reduce(torch.promote_types, (p.grad.dtype for p in with_grads if p.grad is not None))
