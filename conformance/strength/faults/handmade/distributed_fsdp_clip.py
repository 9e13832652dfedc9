"""Faults in clip_grad_norm_: norms of too few or too many gradients, and rounded norms."""

from __future__ import annotations

import functools
from typing import Any

import torch

from conformance.strength.faults.fault import Decorator, Substitute
from conformance.strength.faults.handmade.distributed_fsdp import broken, gradients, ranks


def clipping(thread: str) -> Decorator:
    """Return a decorator of `fault(clip, model, max_norm, norm_type)`. `clip(max_norm, norm_type)` clips correctly."""

    def register(fault: Substitute) -> Substitute:
        @functools.wraps(fault)
        def framed(
            original: Any, self: Any, max_norm: Any, norm_type: Any = 2.0, **kwargs: Any
        ) -> torch.Tensor:
            def clip(max_norm: Any = max_norm, norm_type: Any = norm_type) -> torch.Tensor:
                return original(self, max_norm, norm_type, **kwargs)

            with torch.no_grad():
                return fault(clip, self, max_norm, float(norm_type))

        return broken("clip_grad_norm_", thread)(framed)

    return register


# Gradients in the norm


@clipping("pytorch/pytorch#170862")
def local_norm(clip: Any, model: Any, max_norm: Any, norm_type: float) -> torch.Tensor:
    """Each rank clips by the norm of its own shards."""
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in gradients(model) if grad.numel()]
    if not norms:
        return clip()
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for grad in gradients(model):
        grad.mul_((float(max_norm) / (norm + 1e-6)).clamp(max=1.0).to(grad.dtype))
    return norm


@clipping("pytorch/pytorch#88955")
def unsharded_counted_by_all(clip: Any, model: Any, max_norm: Any, norm_type: float) -> torch.Tensor:
    """Unsharded gradients count once for each rank."""
    is_sharded = model.sharding_strategy.name != "NO_SHARD"
    factor = 1.0 if is_sharded else ranks(model) ** (1 / norm_type)
    return clip(float(max_norm) / factor) * factor


@clipping("pytorch/pytorch#94835")
def skips_clip_without_gradients(clip: Any, model: Any, max_norm: Any, norm_type: float) -> torch.Tensor:
    """A rank without gradients takes no part in the clipping."""
    return clip() if gradients(model) else torch.zeros(())


# The norm


@clipping("facebookresearch/fairscale#263")
def norm_in_bfloat16(clip: Any, model: Any, max_norm: Any, norm_type: float) -> torch.Tensor:
    """The norm is rounded to bfloat16."""
    norm = clip()
    return norm.bfloat16().to(norm.dtype)
