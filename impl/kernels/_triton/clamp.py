"""Clamp a list of tensors in one launch."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from impl.kernels._table import chunk_table
from impl.kernels._triton.chunk import F64, LAUNCH, load, on_device, store, visit_chunk
from impl.kernels._triton.launch import launch


@triton.jit
def _clamp_chunk(
    pointer: tl.tensor,  # to `count` elements, read and overwritten
    count: tl.tensor,
    bounds: tl.tuple,  # f64
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    low, high = bounds
    for start in range(0, CHUNK, BLOCK):
        if WHOLE or start < count:
            offsets = start + tl.arange(0, BLOCK)
            values = load(pointer, offsets, count, WHOLE)
            # nan compares false and stays; where the bounds cross, `high` comes last and wins.
            values = tl.where(values < low.to(values.dtype), low.to(values.dtype), values)
            values = tl.where(values > high.to(values.dtype), high.to(values.dtype), values)
            store(pointer, offsets, values, count, WHOLE)


@triton.jit
def clamp_kernel(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    low: F64,
    high: F64,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Clamp in place. f32: 8 B an element (4 read, 4 written); one launch a list."""
    bounds = tl.full([], low, tl.float64), tl.full([], high, tl.float64)
    visit_chunk(rows_ptr, _clamp_chunk, bounds, CHUNK, BLOCK)


def launch_clamp(tensors: Sequence[Tensor], low: float, high: float) -> bool:
    """Run the kernel; False, and nothing done, where it cannot take these tensors or bounds."""
    # A nan bound makes everything nan, and one that a dtype cannot hold is torch's to refuse. The interpreter of
    # Triton 3.6 takes -0.0 for 0.0.
    widest = min(torch.finfo(t.dtype).max for t in tensors)
    for bound in (low, high):
        is_negative_zero = bound == 0 and math.copysign(1.0, bound) < 0
        if math.isnan(bound) or widest < abs(bound) < math.inf or is_negative_zero:
            return False
    table = chunk_table(tensors)
    if table is None:
        return False
    if table.chunks:
        with on_device(table.rows):
            launch(clamp_kernel, (table.chunks,), table.rows, low, high, **LAUNCH)
        torch.autograd.graph.increment_version(tensors)
    return True
