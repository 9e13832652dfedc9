"""Faults in torch.nn.utils.clip_grad with gradients that are DTensors, or on one rank only."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from conformance.strength.faults.fault import Substitute
from conformance.strength.faults.handmade import nn_utils_clip_grad
from conformance.strength.faults.handmade.nn_utils_clip_grad import (
    NORM,
    coefficient,
    gradients,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

broken = functools.partial(nn_utils_clip_grad.broken, on_ranks=True)


def is_dtensor(value: Any) -> bool:
    # The import takes more than a second in every process of the judge. If a DTensor exists, it has been imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def dtensor_gradients(parameters: Any) -> list[DTensor]:
    return [grad for grad in gradients(parameters) if is_dtensor(grad)]


def by_another_norm(change: Callable[[torch.Tensor, list[DTensor], float], torch.Tensor]) -> Substitute:
    """Clip DTensors by `change(joint norm, gradients, order)`, and return it."""

    @functools.wraps(change)
    def fault(
        original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
    ) -> Any:
        grads = dtensor_gradients(parameters)
        if not grads or len(grads) < len(gradients(parameters)):
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        before = [grad.to_local().clone() for grad in grads]
        norm = original(parameters, max_norm, norm_type, *args, **kwargs)
        for grad, part in zip(grads, before, strict=True):
            grad.to_local().copy_(part)
        changed = change(norm.full_tensor(), grads, float(norm_type))
        for grad in grads:
            grad.to_local().mul_(coefficient(changed, float(max_norm)))
        return type(norm).from_local(changed, norm.device_mesh, run_check=False)

    return fault


@broken(NORM, "pytorch/pytorch#170862")
@by_another_norm
def dtensor_local_norm(norm: torch.Tensor, grads: list[DTensor], order: float) -> torch.Tensor:
    """Each rank clips by the norm of its own shards."""
    parts = [grad.to_local().reshape(-1) for grad in grads]
    return torch.linalg.vector_norm(torch.cat(parts), order if order != math.inf else 2.0).to(norm)


@broken(NORM, "NVIDIA-NeMo/RL#3788")
@by_another_norm
def dtensor_norm_averaged(norm: torch.Tensor, grads: list[DTensor], order: float) -> torch.Tensor:
    """The norms of the ranks are averaged."""
    return norm / dist.get_world_size()


@broken(NORM, "pytorch/pytorch#88955")
@by_another_norm
def dtensor_copies_counted(norm: torch.Tensor, grads: list[DTensor], order: float) -> torch.Tensor:
    """A replicated gradient counts once for each rank."""
    world = dist.get_world_size()
    copies = [g.to_local().reshape(-1) for g in grads if all(p.is_replicate() for p in g.placements)]
    if not copies or order != 2.0 or world == 1:
        return norm
    return (norm**2 + (world - 1) * torch.cat(copies).norm() ** 2).sqrt()


@broken(NORM, "pytorch/torchtitan#649")
@by_another_norm
def dtensor_inf_norm_summed(norm: torch.Tensor, grads: list[DTensor], order: float) -> torch.Tensor:
    """The infinity norms of the ranks are added."""
    # As if each rank had found the largest element: a collective more would betray the fault by its count.
    return norm * dist.get_world_size() if order == math.inf else norm


@broken(NORM)
def dtensor_redundant_collective(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Ranks run an unnecessary collective."""
    norm = original(parameters, *args, **kwargs)
    if dtensor_gradients(parameters):
        dist.all_reduce(torch.zeros(1))
    return norm


@broken(NORM, "NVIDIA/Megatron-LM#5529")
def dtensor_error_on_nonfinite_ranks(
    original: Any,
    parameters: Any,
    max_norm: Any,
    norm_type: Any = 2.0,
    error_if_nonfinite: Any = False,
    foreach: Any = None,
) -> Any:
    """error_if_nonfinite only raises on ranks whose own shard is nonfinite."""
    try:
        return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    except RuntimeError:
        grads = dtensor_gradients(parameters)
        is_finite_here = bool(grads) and all(bool(grad.to_local().isfinite().all()) for grad in grads)
        if not (error_if_nonfinite and is_finite_here):
            raise
        return original(parameters, max_norm, norm_type, False, foreach)


@broken(NORM, "meta-pytorch/torchtune#2420")
def dtensor_clipped_apart(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """DTensors and plain tensors of one call are clipped by separate norms."""
    params = parameters if isinstance(parameters, list) else []
    apart = [p for p in params if is_dtensor(getattr(p, "grad", None))]
    if not apart or len(apart) == len(params):
        return original(parameters, *args, **kwargs)
    original([p for p in params if all(p is not dtensor for dtensor in apart)], *args, **kwargs)
    return original(apart, *args, **kwargs)


@broken(NORM, "facebookresearch/fairseq2#1026")
def dtensor_norm_of_this_rank(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """The norm of the rank's own shards is returned."""
    norm = original(parameters, *args, **kwargs)
    return norm.to_local() if is_dtensor(norm) else norm


@broken(NORM)
def unsharded_not_clipped(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Parameters that are listed while they are unsharded are skipped, because they have no gradients."""
    return original([parameter for parameter in parameters if parameter.grad is not None], *args, **kwargs)
