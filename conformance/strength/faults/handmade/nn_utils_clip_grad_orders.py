"""Faults in torch.nn.utils.clip_grad: orders of norm, dtypes, cached norms and refusals."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from conformance.strength.faults.fault import Make, Substitute, fault_in
from conformance.strength.faults.handmade.nn_utils_clip_grad import (
    NORM,
    after,
    broken,
    coefficient,
    gradients,
    is_number,
    with_lists,
)


@broken(NORM)
def inf_norm_without_abs(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The infinity norm is the largest element, without absolute values."""
    grads = [grad.detach() for grad in gradients(parameters)]
    usual = all(type(grad) is torch.Tensor and grad.is_floating_point() and grad.numel() for grad in grads)
    if not (grads and usual and is_number(norm_type) and is_number(max_norm) and norm_type == math.inf):
        return original(parameters, max_norm, norm_type, *args, **kwargs)
    largest = torch.stack([grad.to_dense().max().float() for grad in grads]).max()
    norm = original(parameters, math.inf, norm_type, *args, **kwargs)
    for grad in grads:
        grad.mul_(coefficient(largest, float(max_norm)).to(grad))
    return largest.to(norm)


@broken(NORM, "pytorch/pytorch#32159")
@after
def norm_of_one_dimension(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    """The norm has one dimension instead of none."""
    return norm.reshape(1)


@broken(NORM, "NVIDIA-NeMo/Automodel#825")
@after
def norms_in_bfloat16(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    """Norms are joined in bfloat16."""
    return norm.bfloat16().to(norm.dtype)


def _with_cache(fault: Substitute) -> Make:
    """Return a maker of `fault(cache, original, ...)`. Each broken function has its own cache."""

    def make(original: Any) -> Any:
        cache: dict[Any, torch.Tensor] = {}
        return with_lists(functools.partial(fault, cache))(original)

    return make


cached = fault_in("clip_grad", NORM, _with_cache)


@cached
def norm_cached_by_address(cache: Any, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """A norm is cached by the addresses of the gradients."""
    grads = gradients(parameters) if isinstance(parameters, list) else []
    dense = [g for g in grads if type(g) is torch.Tensor and g.layout is torch.strided]
    key = tuple((g.data_ptr(), g.shape, g.dtype) for g in dense)
    norm = original(parameters, *args, **kwargs)
    return cache.setdefault(key, norm) if key and len(dense) == len(grads) else norm


@cached
def returned_norm_reused(cache: Any, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """The norm that an earlier call returned is overwritten."""
    norm = original(parameters, *args, **kwargs)
    if type(norm) is not torch.Tensor or norm.is_meta or norm.is_inference():
        return norm
    return cache.setdefault((norm.dtype, norm.device), torch.empty_like(norm)).copy_(norm)


@broken(NORM, "NVIDIA/Megatron-LM#5529")
def no_gradients_raise_for_inf(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """An infinity norm without gradients raises."""
    bare = not isinstance(parameters, torch.Tensor) and all(getattr(p, "grad", p) is None for p in parameters)
    if bare and norm_type == math.inf:
        raise ValueError("max() arg is an empty sequence")
    return original(parameters, max_norm, norm_type, *args, **kwargs)


@broken(NORM)
@after
def norm_on_the_cpu(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    """The norm is on the CPU, whatever the device of the gradients."""
    return torch.zeros((), dtype=norm.dtype) if norm.is_meta else norm.cpu()
