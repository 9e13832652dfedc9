"""Faults in torch.nn.utils.clip_grad: orders of norm, dtypes, kept norms, warnings and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute, in_function, register_fault
from conformance.strength.faults.handmade.nn_utils_clip_grad import (
    NORM,
    after,
    as_list,
    broken,
    coefficient,
    gradients,
    is_number,
)


def of_order(
    order: Callable[[float], bool], norm_of: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Substitute:
    """Clip by `norm_of(gradients)` instead for the chosen orders, and return that norm."""

    def fault(
        original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        parameters = as_list(parameters)
        grads = [grad.detach() for grad in gradients(parameters)]
        usual = all(type(grad) is torch.Tensor and grad.is_floating_point() for grad in grads)
        if not (grads and usual and is_number(norm_type) and is_number(max_norm) and order(norm_type)):
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        before = [grad.clone() for grad in grads]
        dtype = original(parameters, max_norm, norm_type, *args, **kwargs).dtype
        for grad, copy in zip(grads, before, strict=True):
            grad.copy_(copy)
        norm = norm_of([grad.to_dense() for grad in grads]).to(dtype)
        for grad in grads:
            grad.mul_(coefficient(norm, float(max_norm)).to(grad.device))
        return norm

    return fault


broken("inf_norm_without_abs", NORM, "the infinity norm is the largest element, whatever the sign of others")(
    of_order(
        lambda order: order == math.inf,
        lambda grads: torch.stack([g.max() if g.numel() else g.new_zeros(()) for g in grads]).max(),
    )
)


@broken("norm_of_one_dimension", NORM, "the norm has one dimension instead of none", "pytorch/pytorch#32159")
@after
def norm_of_one_dimension(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    return norm.reshape(1)


@broken("norms_in_bfloat16", NORM, "norms are joined in bfloat16", "NVIDIA-NeMo/Automodel#825")
@after
def norms_in_bfloat16(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    return norm.bfloat16().to(norm.dtype)


@broken("imaginary_parts_lost", NORM, "the norm of complex gradients is that of their real parts")
def imaginary_parts_lost(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    parameters = as_list(parameters)
    parts = [g.detach().imag for g in gradients(parameters) if g.is_complex() and not g.is_sparse]
    before = [part.clone() for part in parts]
    for part in parts:
        part.zero_()
    try:
        return original(parameters, max_norm, norm_type, *args, **kwargs)
    finally:
        for part, copy in zip(parts, before, strict=True):
            part.copy_(copy)


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
