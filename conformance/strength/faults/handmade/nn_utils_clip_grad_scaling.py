"""Faults in torch.nn.utils.clip_grad: which gradients are scaled or clamped, and by how much."""

from __future__ import annotations

from typing import Any

import torch

from conformance.strength.faults.handmade.nn_utils_clip_grad import (
    NORM,
    WITH_NORM,
    as_list,
    broken,
    coefficient,
    gradients,
    in_path,
    is_number,
    left_out,
    plain,
    scaled_by,
)


@broken("sparse_refused", NORM, "sparse gradients are refused", "pytorch/pytorch#7257")
def sparse_refused(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    parameters = as_list(parameters)
    listed = parameters if isinstance(parameters, list) else []
    if any(p.grad is not None and p.grad.is_sparse for p in listed if isinstance(p, torch.Tensor)):
        raise RuntimeError("sparse gradients cannot be multiplied by a tensor")
    return original(parameters, *args, **kwargs)


@broken("negative_max_norm_clamped", NORM, "a negative max_norm counts as zero", "pytorch/pytorch#31367")
def negative_max_norm_clamped(
    original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    at_least_zero = max(0.0, max_norm) if is_number(max_norm) else max_norm
    return original(parameters, at_least_zero, *args, **kwargs)


broken("scales_up", NORM, "gradients below max_norm are scaled up to it", "pytorch/pytorch#151554")(
    scaled_by(lambda norm, max_norm: max_norm / (norm + 1e-6))
)
broken("last_element_left_out", NORM, "the last element of a long gradient is not scaled")(
    left_out(lambda grads: [g.view(-1)[-1:] for g in grads if g.numel() > 1024 and g.is_contiguous()])
)
broken(
    "one_by_one_unbounded", NORM, "foreach=False scales gradients below max_norm up", "pytorch/pytorch#151554"
)(in_path(False, lambda norm, max_norm: max_norm / (norm + 1e-6)))
broken("lists_rounded", NORM, "foreach=True scales by a factor rounded to bfloat16")(
    in_path(True, lambda norm, max_norm: coefficient(norm, max_norm).bfloat16().float())
)
broken("zero_dim_left_out", NORM, "gradients without dimensions are not scaled")(
    left_out(lambda grads: [grad for grad in grads if grad.dim() == 0])
)
broken("not_contiguous_left_out", NORM, "gradients that are not contiguous are not scaled")(
    left_out(lambda grads: [g for g in grads if not g.is_sparse and plain(g) and not g.is_contiguous()])
)
broken("complex_left_out", NORM, "complex gradients are not scaled")(
    left_out(lambda grads: [grad for grad in grads if grad.is_complex() and not grad.is_sparse])
)


@broken("listed_twice_scaled_once", NORM, "a parameter that is listed twice is taken once")
def listed_twice_scaled_once(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    parameters = as_list(parameters)
    if isinstance(parameters, list):
        parameters = list({id(p): p for p in parameters}.values())
    return original(parameters, *args, **kwargs)


@broken(
    "sparse_scaled_twice",
    WITH_NORM,
    "the values of sparse gradients are scaled twice",
    "pytorch/pytorch#7257",
)
def sparse_scaled_twice(
    original: Any, parameters: Any, max_norm: Any, total_norm: Any, foreach: Any = None
) -> None:
    parameters = as_list(parameters)
    original(parameters, max_norm, total_norm, foreach)
    for grad in gradients(parameters):
        if grad.is_sparse:
            grad._values().mul_(coefficient(total_norm, float(max_norm)))


@broken(
    "second_dtype_rounded",
    NORM,
    "gradients of a second dtype are rounded to the first one's",
    "pytorch/pytorch#12159",
)
def second_dtype_rounded(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    parameters = as_list(parameters)
    norm = original(parameters, *args, **kwargs)
    grads = [grad.detach() for grad in gradients(parameters) if plain(grad) and grad.is_floating_point()]
    for grad in grads:
        if grad.dtype != grads[0].dtype and not grad.is_sparse:
            grad.copy_(grad.to(grads[0].dtype))
    return norm
