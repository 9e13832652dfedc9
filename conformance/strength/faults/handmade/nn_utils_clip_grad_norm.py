"""Faults in torch.nn.utils.clip_grad: the norm that is found, returned or complained about."""

from __future__ import annotations

import math
import types
from typing import Any

import torch

from conformance.strength.faults.fault import fault_in, in_function
from conformance.strength.faults.handmade.nn_utils_clip_grad import (
    NORM,
    after,
    broken,
    coefficient,
    gradients,
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
