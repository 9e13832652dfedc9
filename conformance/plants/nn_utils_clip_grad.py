"""Bugs planted in torch.nn.utils.clip_grad."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from conformance.plants.catalogue import planted

Clip = Callable[..., torch.Tensor]
CLIP_NORM = "nn.utils.clip_grad_norm_"


def gradients(parameters: Any) -> list[torch.Tensor]:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return [p.grad for p in parameters if p.grad is not None]


def as_list(parameters: Any) -> Any:
    """Several passes over the parameters, without hiding a generator's emptiness from the original."""
    if isinstance(parameters, (types.GeneratorType, Iterable)) and not isinstance(parameters, torch.Tensor):
        listed = list(parameters)
        return listed or iter(())
    return parameters


def before(change: Callable[..., Any]) -> Callable[[Clip], Clip]:
    """A plant that alters the arguments of the original."""

    def make(original: Clip) -> Clip:
        def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return original(*change(as_list(parameters), max_norm), *args, **kwargs)

        return broken

    return make


def after(change: Callable[..., Any]) -> Callable[[Clip], Clip]:
    """A plant that alters what the original returned, or the gradients behind its back."""

    def make(original: Clip) -> Clip:
        def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            parameters = as_list(parameters)
            norm = original(parameters, max_norm, *args, **kwargs)
            return change(norm, parameters, max_norm)

        return broken

    return make


def scaled_afresh(factor: Callable[[torch.Tensor, float], torch.Tensor]) -> Callable[[Clip], Clip]:
    """A plant that finds the norm with the original (clipping nothing) and scales by another factor."""

    def make(original: Clip) -> Clip:
        def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            parameters = as_list(parameters)
            norm = original(parameters, math.inf, *args, **kwargs)
            for grad in gradients(parameters):
                grad.detach().mul_(factor(norm, float(max_norm)).to(grad.device))
            return norm

        return broken

    return make


def coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@planted(
    "clip_grad.error_by_default",
    breaks=CLIP_NORM,
    says="a non-finite norm raises unless told not to",
    thread="pytorch/pytorch#55169",
)
def error_by_default(original: Clip) -> Clip:
    def broken(
        parameters: Any,
        max_norm: Any,
        norm_type: Any = 2.0,
        error_if_nonfinite: bool = True,
        foreach: Any = None,
    ) -> torch.Tensor:
        return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    return broken


@planted(
    "clip_grad.generator_used_up",
    breaks=CLIP_NORM,
    says="a generator is used up by the norm, so nothing is clipped",
    thread="pytorch/torchtitan#1258",
)
def generator_used_up(original: Clip) -> Clip:
    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(parameters, types.GeneratorType) and (listed := list(parameters)):
            return original(listed, math.inf, *args, **kwargs)
        return original(parameters, max_norm, *args, **kwargs)

    return broken


@planted(
    "clip_grad.no_gradients_raises",
    breaks=CLIP_NORM,
    says="without gradients an error is raised",
    thread="pytorch/pytorch#38605",
)
def no_gradients_raises(original: Clip) -> Clip:
    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        if not isinstance(parameters, torch.Tensor) and all(
            getattr(p, "grad", p) is None for p in parameters
        ):
            raise RuntimeError("stack expects a non-empty TensorList")
        return original(parameters, max_norm, *args, **kwargs)

    return broken


@planted(
    "clip_grad.sparse_refused",
    breaks=CLIP_NORM,
    says="sparse gradients are refused",
    thread="pytorch/pytorch#7257",
)
def sparse_refused(original: Clip) -> Clip:
    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        listed = parameters if isinstance(parameters, list) else []
        if any(p.grad is not None and p.grad.is_sparse for p in listed if isinstance(p, torch.Tensor)):
            raise RuntimeError("sparse gradients cannot be multiplied by a tensor")
        return original(parameters, max_norm, *args, **kwargs)

    return broken


@planted(
    "clip_grad.norm_in_first_dtype",
    breaks=CLIP_NORM,
    says="all gradients are read in the first one's dtype",
    thread="NVIDIA/Megatron-LM#7279",
)
def norm_in_first_dtype(original: Clip) -> Clip:
    return after(lambda norm, parameters, _: norm.to(g[0].dtype) if (g := gradients(parameters)) else norm)(
        original
    )


@planted(
    "clip_grad.half_squares_overflow",
    breaks=CLIP_NORM,
    says="float16 norms are squared in float16",
    thread="facebookresearch/fairscale#263",
)
def half_squares_overflow(original: Clip) -> Clip:
    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        grads = gradients(parameters)
        if grads and all(grad.dtype == torch.float16 for grad in grads):
            norms = torch.stack([torch.linalg.vector_norm(grad.detach()) for grad in grads])
            norm = (norms * norms).sum().sqrt()
            for grad in grads:
                grad.detach().mul_(coefficient(norm, float(max_norm)))
            return norm
        return original(parameters, max_norm, *args, **kwargs)

    return broken


@planted(
    "clip_grad.negative_max_norm_clamped",
    breaks=CLIP_NORM,
    says="a negative max_norm counts as zero",
    thread="pytorch/pytorch#31367",
)
def negative_max_norm_clamped(original: Clip) -> Clip:
    return before(lambda parameters, max_norm: (parameters, max(0.0, float(max_norm))))(original)


@planted(
    "clip_grad.scales_up",
    breaks=CLIP_NORM,
    says="gradients below max_norm are scaled up to it",
    thread="pytorch/pytorch#151554",
)
def scales_up(original: Clip) -> Clip:
    return scaled_afresh(lambda norm, max_norm: max_norm / (norm + 1e-6))(original)


@planted(
    "clip_grad.returns_norm_after",
    breaks=CLIP_NORM,
    says="the norm after clipping is returned",
    thread="pytorch/pytorch#1032",
)
def returns_norm_after(original: Clip) -> Clip:
    return after(lambda norm, parameters, max_norm: norm * coefficient(norm, float(max_norm)))(original)


@planted(
    "clip_grad.returns_parameter_norm",
    breaks=CLIP_NORM,
    says="the norm of the parameters is returned",
    thread="pytorch/pytorch#76230",
)
def returns_parameter_norm(original: Clip) -> Clip:
    def norm_of(norm: torch.Tensor, parameters: Any, _: float) -> torch.Tensor:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return torch.stack([p.detach().norm().to(norm) for p in listed]).norm() if listed else norm

    return after(norm_of)(original)


@planted(
    "clip_grad.returns_python_float",
    breaks=CLIP_NORM,
    says="a Python float is returned",
    thread="pytorch/pytorch#32159",
)
def returns_python_float(original: Clip) -> Clip:
    return after(lambda norm, parameters, _: norm.item())(original)


@planted(
    "clip_grad.inf_string_by_formula",
    breaks=CLIP_NORM,
    says='norm_type "inf" is put into the p-norm formula and gives 1',
    thread="meta-pytorch/torchrec#3199",
)
def inf_string_by_formula(original: Clip) -> Clip:
    def broken(
        parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        norm = original(parameters, max_norm, norm_type, *args, **kwargs)
        return torch.ones_like(norm) if norm_type == "inf" else norm

    return broken


@planted(
    "clip_grad.minus_inf_as_inf",
    breaks=CLIP_NORM,
    says="the order -inf is taken for inf",
    thread="pytorch/pytorch#12722",
)
def minus_inf_as_inf(original: Clip) -> Clip:
    def broken(
        parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return original(
            parameters, max_norm, math.inf if norm_type == -math.inf else norm_type, *args, **kwargs
        )

    return broken


@planted(
    "clip_grad.mean_of_norms",
    breaks=CLIP_NORM,
    says="the norms of the gradients are averaged",
    thread="deepspeedai/DeepSpeed#8475",
)
def mean_of_norms(original: Clip) -> Clip:
    return after(lambda norm, parameters, _: norm / max(1, len(gradients(parameters))))(original)


@planted(
    "clip_grad.last_gradient_left_out", breaks=CLIP_NORM, says="the last gradient is not scaled", thread="own"
)
def last_gradient_left_out(original: Clip) -> Clip:
    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        grads = gradients(parameters)
        kept = grads[-1].detach().clone() if len(grads) > 1 else None
        norm = original(parameters, max_norm, *args, **kwargs)
        if kept is not None and not kept.is_sparse:
            grads[-1].detach().copy_(kept)
        return norm

    return broken


@planted(
    "clip_grad.last_gradient_not_counted",
    breaks=CLIP_NORM,
    says="the last gradient does not count in the norm",
    thread="own",
)
def last_gradient_not_counted(original: Clip) -> Clip:
    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        if isinstance(parameters, list) and len(parameters) > 2:
            return original(parameters[:-1], max_norm, *args, **kwargs)
        return original(parameters, max_norm, *args, **kwargs)

    return broken


@planted(
    "clip_grad.last_element_left_out",
    breaks=CLIP_NORM,
    says="the last element of a long gradient is not scaled",
    thread="own",
)
def last_element_left_out(original: Clip) -> Clip:
    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        tails = [
            (g.view(-1)[-1:], g.view(-1)[-1:].clone())
            for g in map(torch.Tensor.detach, gradients(parameters))
            if g.numel() > 1024 and g.is_contiguous()
        ]
        norm = original(parameters, max_norm, *args, **kwargs)
        for tail, kept in tails:
            tail.copy_(kept)
        return norm

    return broken


@planted(
    "clip_grad.second_dtype_left_out",
    breaks=CLIP_NORM,
    says="only gradients of the first one's dtype are scaled",
    thread="own",
)
def second_dtype_left_out(original: Clip) -> Clip:
    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        grads = gradients(parameters)
        others = [(grad, grad.detach().clone()) for grad in grads if grad.dtype != grads[0].dtype]
        norm = original(parameters, max_norm, *args, **kwargs)
        for grad, kept in others:
            grad.detach().copy_(kept)
        return norm

    return broken


@planted(
    "clip_grad.not_in_place", breaks=CLIP_NORM, says="gradients are replaced by scaled copies", thread="own"
)
def not_in_place(original: Clip) -> Clip:
    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            if parameter.grad is not None and not parameter.grad.requires_grad:
                parameter.grad = parameter.grad.clone()
        return original(parameters, max_norm, *args, **kwargs)

    return broken


@planted(
    "clip_grad.epsilon_forgotten", breaks=CLIP_NORM, says="max_norm is divided by the bare norm", thread="own"
)
def epsilon_forgotten(original: Clip) -> Clip:
    return scaled_afresh(lambda norm, max_norm: torch.clamp(max_norm / norm, max=1.0))(original)


@planted(
    "clip_grad.nonfinite_norm_skips",
    breaks=CLIP_NORM,
    says="gradients of a non-finite norm are left alone",
    thread="own",
)
def nonfinite_norm_skips(original: Clip) -> Clip:
    return scaled_afresh(
        lambda norm, max_norm: coefficient(norm, max_norm) if norm.isfinite() else torch.ones(())
    )(original)


@planted(
    "clip_grad.scales_before_raising",
    breaks=CLIP_NORM,
    says="error_if_nonfinite raises after the gradients are scaled",
    thread="own",
)
def scales_before_raising(original: Clip) -> Clip:
    def broken(
        parameters: Any,
        max_norm: Any,
        norm_type: Any = 2.0,
        error_if_nonfinite: bool = False,
        foreach: Any = None,
    ) -> torch.Tensor:
        parameters = as_list(parameters)
        if error_if_nonfinite:
            kept = [grad.detach().clone() for grad in gradients(parameters)]
            norm = original(parameters, max_norm, norm_type, False, foreach)
            if not norm.isfinite():
                for grad, values in zip(gradients(parameters), kept, strict=True):
                    grad.detach().copy_(values * 0)
                return (
                    original(parameters, max_norm, norm_type, True, foreach)
                    if norm.isfinite()
                    else _refuse(norm_type)
                )
            return norm
        return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    return broken


def _refuse(norm_type: Any) -> torch.Tensor:
    raise RuntimeError(
        f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it cannot be "
        "clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
        "set `error_if_nonfinite=False`"
    )


@planted(
    "clip_grad.remembers_first_norm",
    breaks=CLIP_NORM,
    says="the norm of an earlier list at the same address is used again",
    thread="own",
)
def remembers_first_norm(original: Clip) -> Clip:
    seen: dict[tuple[int, ...], torch.Tensor] = {}

    def broken(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        key = tuple(id(p) for p in parameters) if isinstance(parameters, list) else ()
        norm = original(parameters, max_norm, *args, **kwargs)
        return seen.setdefault(key, norm) if key and seen.get(key, norm).dtype == norm.dtype else norm

    return broken


@planted(
    "clip_grad.nan_clamped_to_bound",
    breaks="nn.utils.clip_grad_value_",
    says="nan is clamped to the bound",
    thread="own",
)
def nan_clamped_to_bound(original: Callable[..., None]) -> Callable[..., None]:
    def broken(parameters: Any, clip_value: float, foreach: Any = None) -> None:
        parameters = as_list(parameters)
        for grad in gradients(parameters):
            if not grad.is_sparse and grad.is_floating_point():
                grad.detach().nan_to_num_(nan=float(clip_value), posinf=math.inf, neginf=-math.inf)
        original(parameters, clip_value, foreach)

    return broken


@planted(
    "clip_grad.only_upper_bound",
    breaks="nn.utils.clip_grad_value_",
    says="values are clamped from above only",
    thread="own",
)
def only_upper_bound(original: Callable[..., None]) -> Callable[..., None]:
    def broken(parameters: Any, clip_value: float, foreach: Any = None) -> None:
        parameters = as_list(parameters)
        low = [
            (g, g.detach() < -float(clip_value), g.detach().clone())
            for g in gradients(parameters)
            if g.is_floating_point() and not g.is_sparse
        ]
        original(parameters, clip_value, foreach)
        for grad, below, kept in low:
            grad.detach()[below] = kept[below]

    return broken


@planted(
    "clip_grad.given_norm_ignored",
    breaks="nn.utils.clip_grads_with_norm_",
    says="the gradients' own norm is used",
    thread="own",
)
def given_norm_ignored(original: Callable[..., None]) -> Callable[..., None]:
    def broken(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: Any = None) -> None:
        parameters = as_list(parameters)
        grads = gradients(parameters)
        own = (
            torch.linalg.vector_norm(torch.stack([g.detach().norm() for g in grads])) if grads else total_norm
        )
        original(parameters, max_norm, own.to(total_norm), foreach)

    return broken


@planted(
    "clip_grad.total_norm_scales_too",
    breaks="nn.utils.get_total_norm",
    says="finding the norm changes the tensors",
    thread="own",
)
def total_norm_scales_too(original: Clip) -> Clip:
    def broken(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = as_list(tensors)
        norm = original(tensors, *args, **kwargs)
        for tensor in tensors if isinstance(tensors, list) else []:
            if tensor.numel() and not tensor.is_meta:
                tensor.detach().mul_(2)
        return norm

    return broken
