"""Faults in torch.nn.utils.clip_grad: orders of norm, dtypes, kept norms, warnings and refusals."""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from conformance.faults.fault import Substitute, in_function, register_fault
from conformance.faults.handmade.nn_utils_clip_grad import (
    NORM,
    after,
    as_list,
    broken,
    coefficient,
    forgiving,
    gradients,
    is_number,
)

TOTAL = "nn.utils.get_total_norm"
OLD = "nn.utils.clip_grad_norm"


def of_order(
    order: Callable[[float], bool], norm_of: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Substitute:
    """For those orders the gradients are clipped by `norm_of(gradients)` instead, and it is returned."""

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
        for grad, kept in zip(grads, before, strict=True):
            grad.copy_(kept)
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
broken("fractions_as_one", NORM, "orders between 0 and 1 are taken for 1")(
    of_order(
        lambda order: 0 < order < 1,
        lambda grads: torch.stack([torch.linalg.vector_norm(g, 1.0) for g in grads]).sum(),
    )
)
broken("order_zero_counts_elements", NORM, "the norm of order 0 counts elements instead of tensors")(
    of_order(
        lambda order: order == 0,
        lambda grads: torch.stack([g.count_nonzero().float() for g in grads]).sum(),
    )
)


@broken("order_zero_is_default", NORM, "norm_type=0 is taken for none given")
def order_zero_is_default(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return original(parameters, max_norm, norm_type or 2.0, *args, **kwargs)


@broken("one_norm_swaps_operands", NORM, "for norm_type=1 the norm is divided by max_norm")
def one_norm_swaps_operands(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if norm_type != 1.0 or not is_number(max_norm):
        return original(parameters, max_norm, norm_type, *args, **kwargs)
    parameters = as_list(parameters)
    norm = original(parameters, math.inf, norm_type, *args, **kwargs)
    for grad in gradients(parameters):
        grad.detach().mul_(torch.clamp(norm / (max_norm + 1e-6), max=1.0))
    return norm


@broken("empty_norm_in_parameters_dtype", NORM, "without gradients the norm has the parameters' dtype")
def empty_norm_in_parameters_dtype(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    parameters = as_list(parameters)
    norm = original(parameters, *args, **kwargs)
    bare = isinstance(parameters, list) and parameters and not gradients(parameters)
    return norm.to(parameters[0].dtype) if bare else norm


@broken("norm_of_one_dimension", NORM, "the norm has one dimension instead of none", "pytorch/pytorch#32159")
@after
def norm_of_one_dimension(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    return norm.reshape(1)


@broken("norm_in_float64", NORM, "the norm comes in float64")
@after
def norm_in_float64(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    return norm.double()


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
        for part, kept in zip(parts, before, strict=True):
            part.copy_(kept)


@register_fault(
    "clip_grad.norm_kept_by_address", NORM, says="a norm is kept by the addresses of the gradients"
)
def norm_kept_by_address(original: Any) -> Any:
    seen: dict[tuple[Any, ...], torch.Tensor] = {}

    def fault(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = as_list(parameters)
        grads = gradients(parameters) if isinstance(parameters, list) else []
        dense = [g for g in grads if type(g) is torch.Tensor and g.layout is torch.strided]
        key = tuple((g.data_ptr(), g.shape, g.dtype) for g in dense)
        norm = original(parameters, *args, **kwargs)
        return seen.setdefault(key, norm) if key and len(dense) == len(grads) else norm

    return in_function(fault)(original)


@register_fault(
    "clip_grad.returned_norm_reused", NORM, says="the norm that an earlier call returned is overwritten"
)
def returned_norm_reused(original: Any) -> Any:
    kept: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def fault(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        norm = original(parameters, *args, **kwargs)
        if type(norm) is not torch.Tensor or norm.is_meta or norm.is_inference():
            return norm
        return kept.setdefault((norm.dtype, norm.device), torch.empty_like(norm)).copy_(norm)

    return in_function(fault)(original)


def complaining(change: Callable[[RuntimeError], Exception]) -> Substitute:
    """The error about a norm that is not finite is another one."""

    def fault(original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if "non-finite" not in str(error):
                raise
            raise change(error) from None

    return fault


broken("error_of_another_class", NORM, "a norm that is not finite raises an ArithmeticError")(
    complaining(lambda error: ArithmeticError(str(error)))
)
broken("error_with_a_full_stop", NORM, "the error about a norm that is not finite ends with a full stop")(
    complaining(lambda error: RuntimeError(f"{error}."))
)


def holds_no_nan(parameters: Any) -> bool:
    grads = [grad.detach() for grad in gradients(parameters)]
    return bool(grads) and not any(bool(grad.to_dense().isnan().any()) for grad in grads)


broken("infinity_is_no_error", NORM, "error_if_nonfinite minds nan alone")(forgiving(holds_no_nan))


@broken("empty_generator_is_silent", NORM, "an empty generator gives no warning")
def empty_generator_is_silent(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return original(
        list(parameters) if isinstance(parameters, types.GeneratorType) else parameters, *args, **kwargs
    )


@broken("empty_list_warns", NORM, "an empty list gives the warning of an empty generator")
def empty_list_warns(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if isinstance(parameters, list) and not parameters:
        return original((p for p in parameters), *args, **kwargs)
    return original(parameters, *args, **kwargs)


@broken("total_norm_reads_twice", TOTAL, "a generator of tensors is used up before the norm is taken")
def total_norm_reads_twice(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if isinstance(tensors, types.GeneratorType):
        list(tensors)
    return original(tensors, *args, **kwargs)


@broken("total_norm_last_missed", TOTAL, "the last of several tensors does not count")
def total_norm_last_missed(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    tensors = as_list(tensors)
    several = isinstance(tensors, list) and len(tensors) > 1
    return original(tensors[:-1] if several else tensors, *args, **kwargs)


@broken("old_spelling_in_another_category", OLD, "the old spelling gives a DeprecationWarning, which few see")
def old_spelling_in_another_category(original: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = original(*args, **kwargs)
    for warning in caught:
        warnings.warn(str(warning.message), DeprecationWarning, stacklevel=3)
    return result


@register_fault(
    "clip_grad.old_spelling_warns_once", OLD, says="the old spelling warns on its first call alone"
)
def old_spelling_warns_once(original: Any) -> Any:
    calls: list[int] = []

    @functools.wraps(original)
    def once(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            if calls:
                warnings.simplefilter("ignore", FutureWarning)
            result = original(*args, **kwargs)
        calls.append(1)
        return result

    return once


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
