"""Clamping of a list of tensors in one launch."""

import math

import torch
import triton
import triton.language as tl

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
def _clamp_chunk(
    address: tl.tensor,  # address of `count` elements, read and overwritten
    DTYPE: tl.constexpr,
    vectors: tl.tensor,
    count: tl.tensor,
    bounds: tl.tuple,  # f64
    BLOCK: tl.constexpr,
) -> None:
    _clamp_span(vector_pointer_to(address, DTYPE), 0, vectors, bounds, BLOCK)
    _clamp_span(pointer_to(address, DTYPE), vectors, count, bounds, BLOCK)


@triton.jit
def _clamp_span(
    pointer: tl.tensor, start: tl.tensor, stop: tl.tensor, bounds: tl.tuple, BLOCK: tl.constexpr
) -> None:
    low, high = bounds
    for block in range(start, stop, BLOCK):
        offsets = tl.arange(0, BLOCK)
        values = load(pointer + block + offsets, offsets < stop - block)
        # nan compares false and stays; where the bounds cross, `high` comes last and wins.
        values = tl.where(values < low.to(values.dtype), low.to(values.dtype), values)
        values = tl.where(values > high.to(values.dtype), high.to(values.dtype), values)
        store(pointer + block + offsets, values, offsets < stop - block)


@triton.jit
def clamp_kernel(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    low: F64,
    high: F64,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Clamp in place. f32: 8 B an element (4 read, 4 written); one launch a list."""
    bounds = tl.full([], low, tl.float64), tl.full([], high, tl.float64)
    visit_chunk(rows_ptr, _clamp_chunk, bounds, DTYPE, BLOCK)


def launch_clamp(tensors: TensorList, low: float, high: float) -> bool:
    """Run the kernel. Return False, without a change, if it does not support the tensors or bounds."""
    # A nan bound makes everything nan, and one that a dtype cannot hold is torch's to refuse. The interpreter of
    # Triton 3.6 takes -0.0 for 0.0.
    widest = min(torch.finfo(t.dtype).max for t in tensors.tensors)
    for bound in (low, high):
        is_negative_zero = bound == 0 and math.copysign(1.0, bound) < 0
        if math.isnan(bound) or widest < abs(bound) < math.inf or is_negative_zero:
            return False
    table = chunk_table(tensors)
    if table is None:
        return False
    if table.chunks:
        with on_device(table.rows):
            launch(clamp_kernel, (table.chunks,), table.rows, low, high, **shape_for(table))
        torch.autograd.graph.increment_version(tensors.tensors)
    return True
