"""Faults in torch.nn.utils.clip_grad: the norm that is found, returned or complained about."""

from __future__ import annotations

import math
import types
from typing import Any

import torch

from conformance.strength.faults.handmade.nn_utils_clip_grad import (
    NORM,
    after,
    as_list,
    broken,
    coefficient,
    gradients,
)


@broken("error_by_default", NORM, "a non-finite norm raises unless told not to", "pytorch/pytorch#55169")
def error_by_default(
    original: Any,
    parameters: Any,
    max_norm: Any,
    norm_type: Any = 2.0,
    error_if_nonfinite: bool = True,
    foreach: Any = None,
) -> torch.Tensor:
    return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@broken(
    "generator_used_up",
    NORM,
    "a generator is used up by the norm, so nothing is clipped",
    "pytorch/torchtitan#1258",
)
def generator_used_up(
    original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if isinstance(parameters, types.GeneratorType) and (listed := list(parameters)):
        return original(listed, math.inf, *args, **kwargs)
    return original(parameters, max_norm, *args, **kwargs)


@broken("no_gradients_raises", NORM, "without gradients an error is raised", "pytorch/pytorch#38605")
def no_gradients_raises(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    parameters = as_list(parameters)
    if not isinstance(parameters, torch.Tensor) and all(getattr(p, "grad", p) is None for p in parameters):
        raise RuntimeError("stack expects a non-empty TensorList")
    return original(parameters, *args, **kwargs)


@broken(
    "norm_in_first_dtype",
    NORM,
    "the norm comes in the first gradient's dtype",
    "NVIDIA/Megatron-LM#7279",
)
@after
def norm_in_first_dtype(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    grads = gradients(parameters)
    return norm.to(grads[0].dtype) if grads else norm


@broken(
    "half_squares_overflow", NORM, "float16 norms are squared in float16", "facebookresearch/fairscale#263"
)
def half_squares_overflow(
    original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    parameters = as_list(parameters)
    grads = gradients(parameters)
    if not grads or any(grad.dtype != torch.float16 for grad in grads):
        return original(parameters, max_norm, *args, **kwargs)
    norms = torch.stack([torch.linalg.vector_norm(grad.detach()) for grad in grads])
    norm = (norms * norms).sum().sqrt()
    for grad in grads:
        grad.detach().mul_(coefficient(norm, float(max_norm)))
    return norm


@broken("returns_norm_after", NORM, "the norm after clipping is returned", "pytorch/pytorch#1032")
@after
def returns_norm_after(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    return norm * coefficient(norm, float(max_norm))


@broken("returns_parameter_norm", NORM, "the norm of the parameters is returned", "pytorch/pytorch#76230")
@after
def returns_parameter_norm(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return torch.stack([p.detach().norm().to(norm) for p in listed]).norm() if listed else norm


@broken("returns_python_float", NORM, "a Python float is returned", "pytorch/pytorch#32159")
@after
def returns_python_float(norm: torch.Tensor, parameters: Any, max_norm: Any) -> float:
    return norm.item()


@broken(
    "inf_string_by_formula",
    NORM,
    'norm_type "inf" is put into the p-norm formula and gives 1',
    "meta-pytorch/torchrec#3199",
)
def inf_string_by_formula(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    norm = original(parameters, max_norm, norm_type, *args, **kwargs)
    return torch.ones_like(norm) if norm_type == "inf" else norm


@broken("minus_inf_as_inf", NORM, "the order -inf is taken for inf", "pytorch/pytorch#12722")
def minus_inf_as_inf(
    original: Any, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    order = math.inf if norm_type == -math.inf else norm_type
    return original(parameters, max_norm, order, *args, **kwargs)


@broken("mean_of_norms", NORM, "the norms of the gradients are averaged", "deepspeedai/DeepSpeed#8475")
@after
def mean_of_norms(norm: torch.Tensor, parameters: Any, max_norm: Any) -> torch.Tensor:
    return norm / max(1, len(gradients(parameters)))
