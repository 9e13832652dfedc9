"""Scaling of a list of tensors in one launch, by a factor or to a norm."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import KernelInterface

from impl.kernels._lists import KERNEL_DTYPES
from impl.kernels._native.memory import TensorList
from impl.kernels._table import chunk_table
from impl.kernels._triton.chunk import (
    F64,
    load,
    on_device,
    pointer_to,
    shape_for,
    store,
    vector_pointer_to,
    visit_chunk,
)
from impl.kernels._triton.launch import launch


@triton.jit
def _scale_chunk(
    address: tl.tensor,  # address of `count` elements, read and overwritten
    DTYPE: tl.constexpr,
    vectors: tl.tensor,
    count: tl.tensor,
    inputs: tl.tuple,
    BLOCK: tl.constexpr,
) -> None:
    (factor,) = inputs
    _scale_span(vector_pointer_to(address, DTYPE), 0, vectors, factor, BLOCK)
    _scale_span(pointer_to(address, DTYPE), vectors, count, factor, BLOCK)


@triton.jit
def _scale_span(
    pointer: tl.tensor, start: tl.tensor, stop: tl.tensor, factor: tl.tensor, BLOCK: tl.constexpr
) -> None:
    for block in range(start, stop, BLOCK):
        offsets = tl.arange(0, BLOCK)
        values = load(pointer + block + offsets, offsets < stop - block)
        store(pointer + block + offsets, values * factor.to(values.dtype), offsets < stop - block)


@triton.jit
def scale_kernel(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    factor_ptr: tl.tensor,  # [] any float dtype
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Multiply by a factor in place. f32: 8 B an element (4 read, 4 written), none if it is 1; one launch a list."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        visit_chunk(rows_ptr, _scale_chunk, (factor,), DTYPE, BLOCK)


@triton.jit
def clip_coefficient(norm: tl.tensor, max_norm: tl.tensor) -> tl.tensor:
    """Compute in f32, or f64 for f64, and round each result to the norm's dtype, like torch's operators."""
    own = norm.dtype
    wide = tl.float64 if own == tl.float64 else tl.float32
    unit = tl.full([], 1.0, wide)
    divisor = (norm.to(wide) + tl.full([], 1e-6, wide)).to(own).to(wide)
    inverse = unit / divisor if own == tl.float64 else tl.div_rn(unit, divisor)
    coefficient = (inverse.to(own).to(wide) * max_norm.to(wide)).to(own).to(wide)
    return tl.where(coefficient > 1.0, unit, coefficient)  # nan stays nan


@triton.jit
def clip_kernel(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    norm_ptr: tl.tensor,  # [] any float dtype
    max_norm: F64,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Multiply by the clip coefficient in place. Bytes as in `scale_kernel`; one launch a list."""
    factor = clip_coefficient(tl.load(norm_ptr), tl.full([], max_norm, tl.float64))
    if factor != 1.0:
        visit_chunk(rows_ptr, _scale_chunk, (factor,), DTYPE, BLOCK)


def launch_scale(tensors: TensorList, factor: Tensor) -> bool:
    """Run the kernel. Return False, without a change, if it does not support the tensors."""
    return _launch(scale_kernel, tensors, factor)


def launch_clip(tensors: TensorList, max_norm: float, total_norm: Tensor) -> bool:
    """Run the kernel. Return False, without a change, if it does not support the tensors or the norm."""
    if total_norm.dtype not in KERNEL_DTYPES or total_norm.is_neg() or total_norm._is_zerotensor():
        return False
    return _launch(clip_kernel, tensors, total_norm, max_norm)


def _launch(kernel: KernelInterface[Any], tensors: TensorList, number: Tensor, *more: float) -> bool:
    table = chunk_table(tensors)
    if table is None:
        return False
    if table.chunks:
        with on_device(table.rows):
            number = number.to(table.rows.device)
            launch(kernel, (table.chunks,), table.rows, number, *more, **shape_for(table))
        torch.autograd.graph.increment_version(tensors.tensors)
    return True
