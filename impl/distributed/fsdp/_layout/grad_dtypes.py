"""Dtypes in which the gradients of `fully_shard` accumulate and are reduced.

Without a `reduce_dtype` in the policy, the parameter decides. Since torch 2.15 its `grad_dtype` counts, or else its
own dtype. In earlier versions gradients stay in the dtype that they are computed in, and torch ignores `grad_dtype`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn

from impl.distributed.fsdp._params.policies import ParamPrecision

FOLLOWS_PARAM = torch.__version__ >= "2.15.dev0"


def has_grad_dtype(param: nn.Parameter) -> bool:
    """Return whether a user has set `grad_dtype`.

    Before torch 2.15 a `grad_dtype` that equals the parameter's dtype looks like none.
    """
    if FOLLOWS_PARAM:
        return param._has_grad_dtype_override  # pyright: ignore[reportAttributeAccessIssue]  new in torch 2.15
    return param.grad_dtype is not param.dtype


def accumulation_dtype(
    param: nn.Parameter, precision: ParamPrecision, compute_dtype: torch.dtype
) -> torch.dtype | None:
    """Return the dtype in which unreduced gradients accumulate, or None for the dtype of each gradient."""
    reduce_dtype = precision.reduce_dtype
    # A real dtype would drop the imaginary part.
    if reduce_dtype is not None and (reduce_dtype.is_complex or not param.dtype.is_complex):
        return reduce_dtype
    if has_grad_dtype(param):
        return param.grad_dtype
    return param.dtype if FOLLOWS_PARAM else compute_dtype


def promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def is_wider(dtype: torch.dtype | None, other: torch.dtype) -> bool:
    """Return whether a floating-point dtype has more bytes than another one."""
    return (
        dtype is not None
        and dtype.is_floating_point
        and other.is_floating_point
        and dtype.itemsize > other.itemsize
    )
