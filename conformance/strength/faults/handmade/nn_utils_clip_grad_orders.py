"""Faults in torch.nn.utils.clip_grad: orders of norm, dtypes, kept norms, warnings and refusals."""

from __future__ import annotations

import math
from typing import Any

import torch

from conformance.strength.faults.fault import in_function, register_fault
from conformance.strength.faults.handmade.nn_utils_clip_grad import (
    NORM,
    after,
    as_list,
    broken,
    coefficient,
    gradients,
    is_number,
)


@broken("inf_norm_without_abs", NORM, "the infinity norm is the largest element, whatever the sign of others")
def inf_norm_without_abs(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    parameters = as_list(parameters)
    grads = [grad.detach() for grad in gradients(parameters)]
    usual = all(type(grad) is torch.Tensor and grad.is_floating_point() and grad.numel() for grad in grads)
    if not (grads and usual and is_number(norm_type) and is_number(max_norm) and norm_type == math.inf):
        return original(parameters, max_norm, norm_type, *args, **kwargs)
    largest = torch.stack([grad.to_dense().max().float() for grad in grads]).max()
    norm = original(parameters, math.inf, norm_type, *args, **kwargs)
    for grad in grads:
        grad.mul_(coefficient(largest, float(max_norm)).to(grad))
    return largest.to(norm)


@broken("norm_of_one_dimension", NORM, "the norm has one dimension instead of none", "pytorch/pytorch#32159")
@after
def norm_of_one_dimension(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    return norm.reshape(1)


@broken("norms_in_bfloat16", NORM, "norms are joined in bfloat16", "NVIDIA-NeMo/Automodel#825")
@after
def norms_in_bfloat16(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    return norm.bfloat16().to(norm.dtype)


@register_fault(
    "clip_grad.norm_kept_by_address", NORM, says="a norm is kept by the addresses of the gradients"
)
def norm_kept_by_address(original: Any) -> Any:
    first_of: dict[tuple[Any, ...], torch.Tensor] = {}

    def fault(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        grads = gradients(parameters) if isinstance(parameters, list) else []
        dense = [g for g in grads if type(g) is torch.Tensor and g.layout is torch.strided]
        key = tuple((g.data_ptr(), g.shape, g.dtype) for g in dense)
        norm = original(parameters, *args, **kwargs)
        return first_of.setdefault(key, norm) if key and len(dense) == len(grads) else norm

    return in_function(fault)(original)


@register_fault(
    "clip_grad.returned_norm_reused", NORM, says="the norm that an earlier call returned is overwritten"
)
def returned_norm_reused(original: Any) -> Any:
    norms: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def fault(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        norm = original(parameters, *args, **kwargs)
        if type(norm) is not torch.Tensor or norm.is_meta or norm.is_inference():
            return norm
        return norms.setdefault((norm.dtype, norm.device), torch.empty_like(norm)).copy_(norm)

    return in_function(fault)(original)


@broken(
    "nothing_of_infinite_order_raises",
    NORM,
    "without gradients an infinity norm raises",
    "NVIDIA/Megatron-LM#5529",
)
def nothing_of_infinite_order_raises(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    parameters = as_list(parameters)
    bare = not isinstance(parameters, torch.Tensor) and all(getattr(p, "grad", p) is None for p in parameters)
    if bare and norm_type == math.inf:
        raise ValueError("max() arg is an empty sequence")
    return original(parameters, max_norm, norm_type, *args, **kwargs)


@broken("norm_on_the_cpu", NORM, "the norm lies on the CPU wherever the gradients are")
@after
def norm_on_the_cpu(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    return torch.zeros((), dtype=norm.dtype) if norm.is_meta else norm.cpu()
