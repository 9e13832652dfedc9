"""Faults in torch.nn.utils.clip_grad: which gradients are scaled or clamped, and by how much."""

from __future__ import annotations

from typing import Any

import torch

from conformance.strength.faults.handmade.nn_utils_clip_grad import (
    NORM,
    WITH_NORM,
    broken,
    coefficient,
    gradients,
    is_number,
    left_out,
    plain,
    scaled_by,
    with_foreach,
)


@broken(NORM, "pytorch/pytorch#7257")
def sparse_refused(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Sparse gradients are refused."""
    listed = parameters if isinstance(parameters, list) else []
    if any(p.grad is not None and p.grad.is_sparse for p in listed if isinstance(p, torch.Tensor)):
        raise RuntimeError("sparse gradients cannot be multiplied by a tensor")
    return original(parameters, *args, **kwargs)


@broken(NORM, "pytorch/pytorch#31367")
def negative_max_norm_clamped(
    original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A negative max_norm counts as zero."""
    at_least_zero = max(0.0, max_norm) if is_number(max_norm) else max_norm
    return original(parameters, at_least_zero, *args, **kwargs)


@broken(NORM, "pytorch/pytorch#151554")
@scaled_by
def scales_up(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Gradients below max_norm are scaled up to it."""
    return max_norm / (norm + 1e-6)


@broken(NORM, "pytorch/pytorch#151554")
@with_foreach(False)
@scaled_by
def one_by_one_unbounded(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """foreach=False scales gradients below max_norm up to it."""
    return max_norm / (norm + 1e-6)


@broken(NORM)
@with_foreach(True)
@scaled_by
def lists_rounded(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """foreach=True scales by a factor that is rounded to bfloat16."""
    return coefficient(norm, max_norm).bfloat16().float()


@broken(NORM)
@left_out
def last_element_left_out(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """The last element of a long gradient is not scaled."""
    return [grad.view(-1)[-1:] for grad in grads if grad.numel() > 1024 and grad.is_contiguous()]


@broken(NORM)
@left_out
def zero_dim_left_out(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """0-dim gradients are not scaled."""
    return [grad for grad in grads if grad.dim() == 0]


@broken(NORM)
@left_out
def not_contiguous_left_out(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients that are not contiguous are not scaled."""
    return [grad for grad in grads if not grad.is_sparse and plain(grad) and not grad.is_contiguous()]


@broken(NORM)
@left_out
def complex_left_out(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Complex gradients are not scaled."""
    return [grad for grad in grads if grad.is_complex() and not grad.is_sparse]


@broken(NORM)
def listed_twice_scaled_once(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """A parameter that is listed twice counts once."""
    if isinstance(parameters, list):
        parameters = list({id(p): p for p in parameters}.values())
    return original(parameters, *args, **kwargs)


@broken(WITH_NORM, "pytorch/pytorch#7257")
def sparse_scaled_twice(
    original: Any, parameters: Any, max_norm: Any, total_norm: Any, foreach: Any = None
) -> None:
    """The values of sparse gradients are scaled twice."""
    original(parameters, max_norm, total_norm, foreach)
    for grad in gradients(parameters):
        if grad.is_sparse:
            grad._values().mul_(coefficient(total_norm, float(max_norm)))


@broken(NORM, "pytorch/pytorch#12159")
def second_dtype_rounded(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Gradients of a second dtype are rounded to the first one's."""
    norm = original(parameters, *args, **kwargs)
    grads = [grad.detach() for grad in gradients(parameters) if plain(grad) and grad.is_floating_point()]
    for grad in grads:
        if grad.dtype != grads[0].dtype and not grad.is_sparse:
            grad.copy_(grad.to(grads[0].dtype))
    return norm
