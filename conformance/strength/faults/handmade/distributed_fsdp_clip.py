"""Faults in clip_grad_norm_: norms over too little and over too much, and what is scaled by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute
from conformance.strength.faults.handmade.distributed_fsdp import OWN, broken, gradients, ranks

_CLIP = "clip_grad_norm_"


def clipping(fault_id: str, says: str, thread: str = OWN) -> Callable[[Substitute], Substitute]:
    """Enter `fault(clip, model, max_norm, norm_type)`; `clip(max_norm, norm_type)` does it as it should."""

    def enter(fault: Substitute) -> Substitute:
        def framed(
            original: Any, self: Any, max_norm: Any, norm_type: Any = 2.0, **kwargs: Any
        ) -> torch.Tensor:
            def clip(max_norm: Any = max_norm, norm_type: Any = norm_type) -> torch.Tensor:
                return original(self, max_norm, norm_type, **kwargs)

            with torch.no_grad():
                return fault(clip, self, max_norm, float(norm_type))

        broken(fault_id, _CLIP, says, thread)(framed)
        return fault

    return enter


# Gradients in the norm


@clipping("local_norm", "each rank clips by the norm of its own part", "pytorch/pytorch#170862")
def _(clip: Any, model: Any, max_norm: Any, norm_type: float) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in gradients(model) if grad.numel()]
    if not norms:
        return clip()
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for grad in gradients(model):
        grad.mul_((float(max_norm) / (norm + 1e-6)).clamp(max=1.0).to(grad.dtype))
    return norm


@clipping("unsharded_counted_by_all", "what is not sharded is counted once a rank", "pytorch/pytorch#88955")
def _(clip: Any, model: Any, max_norm: Any, norm_type: float) -> torch.Tensor:
    is_sharded = model.sharding_strategy.name != "NO_SHARD"
    factor = 1.0 if is_sharded else ranks(model) ** (1 / norm_type)
    return clip(float(max_norm) / factor) * factor


@clipping(
    "without_gradients_alone",
    "a rank that has no gradients does not take part",
    "pytorch/pytorch#94835",
)
def _(clip: Any, model: Any, max_norm: Any, norm_type: float) -> torch.Tensor:
    return clip() if gradients(model) else torch.zeros(())


# The norm


@clipping("norm_in_bfloat16", "the norm is rounded to bfloat16", "facebookresearch/fairscale#263")
def _(clip: Any, model: Any, max_norm: Any, norm_type: float) -> torch.Tensor:
    norm = clip()
    return norm.bfloat16().to(norm.dtype)
