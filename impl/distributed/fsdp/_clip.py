"""The norm of gradients that are sharded over groups of ranks, and scaling them by it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.distributed.fsdp._unit import Unit
from impl.nn.utils.clip_grad import clip_grads_with_norm_, get_total_norm

_EXCHANGED = torch.float64


def joint_norm(
    units: Sequence[Unit[Any]], others: Sequence[Tensor], norm_type: float, device: torch.device
) -> Tensor:
    """The norm of all gradients of `units`, each element counted once, with those in `others`; 0-dim f64.

    Args:
        others: tensors that every rank holds all of.
    Collectives: one all-gather of a number a rank for each group that gradients are sharded over.
    """
    sharded: dict[dist.ProcessGroup, list[Tensor]] = {}
    replicated: list[Tensor] = []
    for unit in units:
        for group in unit.param_groups:
            grads = [p.grad for p in group.stepped if p.grad is not None]
            if group.groups.shard is None:
                replicated += grads
            else:
                sharded.setdefault(group.groups.shard, []).extend(grads)
    norms = [_norm(grads, norm_type, device) for grads in (replicated, others) if grads]
    for group, grads in sharded.items():
        mine = _norm(grads, norm_type, device).reshape(1)
        parts = mine.new_empty(group.size())
        dist.all_gather(list(parts.split(1)), mine, group=group)
        norms.append(torch.linalg.vector_norm(parts, norm_type))
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
