"""Faults in torch.nn.utils.clip_grad: which gradients are scaled or clamped, and by how much."""

from __future__ import annotations

import math
from typing import Any

import torch

from conformance.faults.handmade.nn_utils_clip_grad import (
    NORM,
    VALUE,
    WITH_NORM,
    as_list,
    broken,
    coefficient,
    forgiving,
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
broken("epsilon_forgotten", NORM, "max_norm is divided by the bare norm")(
    scaled_by(lambda norm, max_norm: torch.clamp(max_norm / norm, max=1.0))
)
broken("nonfinite_norm_skips", NORM, "gradients of a non-finite norm are left alone")(
    scaled_by(lambda norm, max_norm: coefficient(norm, max_norm) if norm.isfinite() else torch.ones(()))
)
broken("last_gradient_left_out", NORM, "the last gradient is not scaled")(
    left_out(lambda grads: [grad for grad in grads[1:][-1:] if not grad.is_sparse])
)
broken("last_element_left_out", NORM, "the last element of a long gradient is not scaled")(
    left_out(lambda grads: [g.view(-1)[-1:] for g in grads if g.numel() > 1024 and g.is_contiguous()])
)
broken("second_dtype_left_out", NORM, "only gradients of the first one's dtype are scaled")(
    left_out(lambda grads: [grad for grad in grads if grad.dtype != grads[0].dtype])
)


@broken("not_in_place", NORM, "gradients are replaced by scaled copies")
def not_in_place(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    parameters = as_list(parameters)
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None and not parameter.grad.requires_grad:
            parameter.grad = parameter.grad.clone()
    return original(parameters, *args, **kwargs)


def zeroed(parameters: Any) -> bool:
    for grad in gradients(parameters):
        grad.detach().mul_(0)
    return False


broken("scales_before_raising", NORM, "error_if_nonfinite raises after the gradients are scaled")(
    forgiving(zeroed)
)


@broken("nan_clamped_to_bound", VALUE, "nan is clamped to the bound")
def nan_clamped_to_bound(original: Any, parameters: Any, clip_value: Any, foreach: Any = None) -> None:
    parameters = as_list(parameters)
    for grad in gradients(parameters) if is_number(clip_value) else []:
        if not grad.is_sparse and grad.is_floating_point():
            grad.detach().nan_to_num_(nan=float(clip_value), posinf=math.inf, neginf=-math.inf)
    original(parameters, clip_value, foreach)


@broken("only_upper_bound", VALUE, "values are clamped from above only")
def only_upper_bound(original: Any, parameters: Any, clip_value: Any, foreach: Any = None) -> None:
    parameters = as_list(parameters)
    low = [
        (grad, grad.detach() < -float(clip_value), grad.detach().clone())
        for grad in (gradients(parameters) if is_number(clip_value) else [])
        if grad.is_floating_point() and not grad.is_sparse
    ]
    original(parameters, clip_value, foreach)
    for grad, below, kept in low:
        grad.detach()[below] = kept[below]


@broken("given_norm_ignored", WITH_NORM, "the gradients' own norm is used")
def given_norm_ignored(
    original: Any, parameters: Any, max_norm: Any, total_norm: torch.Tensor, foreach: Any = None
) -> None:
    parameters = as_list(parameters)
    grads = gradients(parameters)
    norms = [grad.detach().norm() for grad in grads]
    own = torch.linalg.vector_norm(torch.stack(norms)) if grads else total_norm
    original(parameters, max_norm, own.to(total_norm), foreach)


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


@broken("max_norm_zero_is_none", NORM, "max_norm=0 clips nothing")
def max_norm_zero_is_none(original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
    nothing = is_number(max_norm) and max_norm == 0
    return original(parameters, math.inf if nothing else max_norm, *args, **kwargs)


@broken("value_zero_is_none", VALUE, "clip_value=0 clamps nothing")
def value_zero_is_none(original: Any, parameters: Any, clip_value: Any, foreach: Any = None) -> None:
    nothing = is_number(clip_value) and clip_value == 0
    original(parameters, math.inf if nothing else clip_value, foreach)


broken("value_last_gradient_left_out", VALUE, "the last of several gradients is not clamped")(
    left_out(lambda grads: [g for g in grads[1:][-1:] if not g.is_sparse])
)
broken("value_second_dtype_left_out", VALUE, "only gradients of the first one's dtype are clamped")(
    left_out(lambda grads: [grad for grad in grads if grad.dtype != grads[0].dtype])
)


@broken("infinity_not_clamped", VALUE, "infinite elements are not clamped")
def infinity_not_clamped(original: Any, parameters: Any, clip_value: Any, foreach: Any = None) -> None:
    parameters = as_list(parameters)
    dense = [g.detach() for g in gradients(parameters) if not g.is_sparse and plain(g)]
    infinite = [(grad, grad.isinf(), grad.clone()) for grad in dense if grad.is_floating_point()]
    original(parameters, clip_value, foreach)
    for grad, where, before in infinite:
        grad[where] = before[where]


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


@broken("given_norm_changed", WITH_NORM, "the norm that is given is changed")
def given_norm_changed(
    original: Any, parameters: Any, max_norm: Any, total_norm: Any, foreach: Any = None
) -> None:
    original(parameters, max_norm, total_norm, foreach)
    if isinstance(total_norm, torch.Tensor) and is_number(max_norm):
        total_norm.detach().add_(1.0)


@broken(
    "given_norm_last_left_out", WITH_NORM, "the last of several gradients is not scaled by the given norm"
)
def given_norm_last_left_out(
    original: Any, parameters: Any, max_norm: Any, total_norm: Any, foreach: Any = None
) -> None:
    last = left_out(lambda grads: [g for g in grads[1:][-1:] if not g.is_sparse])
    last(original, parameters, max_norm, total_norm, foreach)


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
