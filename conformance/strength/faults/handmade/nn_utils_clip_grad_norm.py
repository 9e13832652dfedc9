"""Faults in torch.nn.utils.clip_grad: the norm that is found, cached, returned or refused."""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import torch

from conformance.strength.faults.fault import Make, Substitute, fault_in, in_function
from conformance.strength.faults.handmade.nn_utils_clip_grad import (
    NORM,
    after,
    broken,
    coefficient,
    gradients,
    is_number,
    with_lists,
)


@broken(NORM, "pytorch/pytorch#55169")
def error_by_default(
    original: Any,
    parameters: Any,
    max_norm: Any,
    norm_type: Any = 2.0,
    error_if_nonfinite: bool = True,
    foreach: Any = None,
) -> torch.Tensor:
    """A nonfinite norm raises by default."""
    return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@fault_in("clip_grad", NORM, in_function, "pytorch/torchtitan#1258")
def generator_exhausted(
    original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Computing the norm exhausts a generator, so nothing is clipped."""
    if isinstance(parameters, types.GeneratorType) and (listed := list(parameters)):
        return original(listed, math.inf, *args, **kwargs)
    return original(parameters, max_norm, *args, **kwargs)


@broken(NORM, "pytorch/pytorch#38605")
def no_gradients_raises(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A call without gradients raises."""
    if not isinstance(parameters, torch.Tensor) and all(getattr(p, "grad", p) is None for p in parameters):
        raise RuntimeError("stack expects a non-empty TensorList")
    return original(parameters, *args, **kwargs)


@broken(NORM, "NVIDIA/Megatron-LM#7279")
@after
def norm_in_first_dtype(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    """The norm is returned in the first gradient's dtype."""
    grads = gradients(parameters)
    return norm.to(grads[0].dtype) if grads else norm


@broken(NORM, "facebookresearch/fairscale#263")
def half_squares_overflow(
    original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """float16 norms are squared in float16."""
    grads = gradients(parameters)
    if not grads or any(grad.dtype != torch.float16 for grad in grads):
        return original(parameters, max_norm, *args, **kwargs)
    norms = torch.stack([torch.linalg.vector_norm(grad.detach()) for grad in grads])
    norm = (norms * norms).sum().sqrt()
    for grad in grads:
        grad.detach().mul_(coefficient(norm, float(max_norm)))
    return norm


@broken(NORM, "pytorch/pytorch#1032")
@after
def returns_norm_after(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    """The norm after clipping is returned."""
    return norm * coefficient(norm, float(max_norm))


@broken(NORM, "pytorch/pytorch#76230")
@after
def returns_parameter_norm(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    """The norm of the parameters is returned."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return torch.stack([p.detach().norm().to(norm) for p in listed]).norm() if listed else norm


@broken(NORM, "pytorch/pytorch#32159")
@after
def returns_python_float(norm: torch.Tensor, parameters: Any, max_norm: Any) -> float:
    """A Python float is returned."""
    return norm.item()


@broken(NORM, "meta-pytorch/torchrec#3199")
def inf_string_by_formula(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """norm_type "inf" is put into the p-norm formula, which gives 1."""
    norm = original(parameters, max_norm, norm_type, *args, **kwargs)
    return torch.ones_like(norm) if norm_type == "inf" else norm


@broken(NORM, "pytorch/pytorch#12722")
def minus_inf_as_inf(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """norm_type -inf is treated as inf."""
    order = math.inf if norm_type == -math.inf else norm_type
    return original(parameters, max_norm, order, *args, **kwargs)


@broken(NORM, "deepspeedai/DeepSpeed#8475")
@after
def mean_of_norms(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    """The norms of the gradients are averaged."""
    return norm / max(1, len(gradients(parameters)))


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
