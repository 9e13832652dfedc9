"""Policies of fully_shard for dtypes, offload and meshes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of the parameters of one fully_shard call. Parameters and `.grad` keep their own dtype.

    Args:
        param_dtype: dtype to compute and gather in; None: the parameters' own.
        reduce_dtype: dtype to reduce gradients in, and to accumulate unsynchronised gradients in; None: the
            parameter's `grad_dtype` with torch 2.15 or later. Earlier versions use it if it is set and differs from
            the parameter's dtype, and otherwise reduce gradients as computed.
        output_dtype: dtype that floating-point outputs of the modules are cast to.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.
        param_dtype_override_fn: called once with each parameter. Returns the dtype to compute in: the parameter's own,
            or `param_dtype` or None to keep the policy. All ranks must return the same.

    Source: torch.distributed.fsdp.MixedPrecisionPolicy 2.15; differences: before 2.15 torch has no
        `param_dtype_override_fn` and ignores `grad_dtype`; a real `reduce_dtype` does not drop the imaginary part of
        complex gradients.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16).cast_forward_inputs
    True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )


@dataclass(frozen=True)
class ParamPrecision:
    """Dtypes of one floating-point parameter.

    Args:
        param_dtype: dtype to compute and gather in; None: the parameter's own.
        reduce_dtype: dtype to reduce gradients in; None: the same as in MixedPrecisionPolicy.
        master_dtype: dtype of the shards that the optimizer steps, and of `.grad`; None: the parameter's own.

    Source: torch has no such thing.

    >>> ParamPrecision(param_dtype=torch.bfloat16, master_dtype=torch.float32).reduce_dtype is None
    True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class PerParamPrecisionPolicy(MixedPrecisionPolicy):
    """Policy of fully_shard that also sets the dtype of optimizer steps, and optionally the dtypes of each parameter.

    `param_dtype_override_fn` only chooses between two compute dtypes. `precision_of` also knows the name, sets
    all three dtypes to any value, and takes precedence over it.

    With a master dtype, parameters are cast to it when they are sharded. Without a `param_dtype`, modules compute in
    the parameters' original dtype. A forward raises a RuntimeError if masters have another dtype, and names them.

    Args:
        master_dtype: dtype of the shards that the optimizer steps, and of `.grad`; None: the parameters' own.
        precision_of: called with the name of each floating-point parameter, relative to its sharded module, and the
            parameter. Returns all dtypes of the parameter, or None for the dtypes of the policy.

    Source: torch has no such thing.

    >>> norms = lambda name, parameter: ParamPrecision(torch.float32) if "norm" in name else None
    >>> PerParamPrecisionPolicy(torch.bfloat16, master_dtype=torch.float32, precision_of=norms).param_dtype
    torch.bfloat16
    """

    master_dtype: torch.dtype | None = None
    precision_of: Callable[[str, nn.Parameter], ParamPrecision | None] | None = None


def precision_by(policy: MixedPrecisionPolicy, name: str, parameter: nn.Parameter) -> ParamPrecision:
    """Return the dtypes of a parameter.

    Args:
        policy: a MixedPrecisionPolicy of Tandem or torch.

    Raises:
        ValueError: a master dtype would round the parameter, or `param_dtype_override_fn` returns anything but
            `param_dtype`, the parameter's dtype or None.
    """
    precision = ParamPrecision(_param_dtype_of(policy, parameter), policy.reduce_dtype)
    if not parameter.is_floating_point():
        return precision
    if isinstance(policy, PerParamPrecisionPolicy):
        own = None if policy.precision_of is None else policy.precision_of(name, parameter)
        precision = own or replace(precision, master_dtype=policy.master_dtype)
    if precision.master_dtype is None:
        return precision
    if torch.promote_types(precision.master_dtype, parameter.dtype) != precision.master_dtype:
        raise ValueError(
            f"{name} is {parameter.dtype}, which its master_dtype {precision.master_dtype} would round; give a wider "
            "master_dtype, or cast the parameter before it is sharded"
        )
    return replace(precision, param_dtype=precision.param_dtype or parameter.dtype)


def _param_dtype_of(policy: MixedPrecisionPolicy, parameter: nn.Parameter) -> torch.dtype | None:
    override: Any = getattr(policy, "param_dtype_override_fn", None)  # torch's policies lack it before 2.15
    dtype = None if override is None else override(parameter)
    if dtype is None:
        return policy.param_dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"param_dtype_override_fn must return a torch.dtype or None but got {type(dtype)}")
    if dtype not in (policy.param_dtype, parameter.dtype):
        raise ValueError(
            "param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype but got "
            f"{dtype} for a parameter with dtype {parameter.dtype} and param_dtype {policy.param_dtype}"
        )
    return dtype


def resolve_policy(policy: MixedPrecisionPolicy, precision: ParamPrecision) -> MixedPrecisionPolicy:
    """Return the policy of parameters for which `param_dtype_override_fn` has chosen a precision."""
    if getattr(policy, "param_dtype_override_fn", None) is None:
        return policy
    return replace(policy, param_dtype=precision.param_dtype, param_dtype_override_fn=None)


@dataclass
class OffloadPolicy:
    """Policy that keeps parameters, gradients and optimizer states on the device.

    Source: torch.distributed.fsdp.OffloadPolicy 2.13; differences: none.

    >>> OffloadPolicy() == OffloadPolicy()
    True
    """


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Policy that keeps sharded parameters, their gradients and the optimizer's states on the CPU.

    Args:
        pin_memory: keep parameters and gradients in pinned memory, so that copies run while the host goes on. The host
            waits for them once at the end of a forward and of a backward. Without an accelerator nothing is pinned.

    Source: torch.distributed.fsdp.CPUOffloadPolicy 2.13; differences: torch raises if there is no accelerator, and
        does not wait at the end of a forward, so that the host may overwrite memory that is still being copied.

    >>> CPUOffloadPolicy().pin_memory
    True
    """

    pin_memory: bool = True


def offloads(policy: OffloadPolicy) -> bool:
    """Return whether `policy` is a CPUOffloadPolicy of Tandem or torch."""
    return hasattr(policy, "pin_memory")


def pins(policy: OffloadPolicy) -> bool:
    return getattr(policy, "pin_memory", False)


@dataclass
class DataParallelMeshDims:
    """Names of the dimensions of a complete mesh that data parallelism uses.

    Args:
        shard: dimensions that parameters are sharded over.
        replicate: dimensions that shards are replicated over.

    Raises:
        ValueError: both are None.
    Source: torch.distributed.fsdp.DataParallelMeshDims 2.13; differences: none.

    >>> DataParallelMeshDims(shard="data").shard_names
    ('data',)
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)
