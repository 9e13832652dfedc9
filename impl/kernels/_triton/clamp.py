"""Clamp a list of tensors in one launch."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from impl.kernels._table import chunk_table
from impl.kernels._triton.chunk import (
    BF16,
    F16,
    F32,
    F64,
    LAUNCH,
    load,
    on_device,
    pointer_to,
    row_of,
    store,
)


@triton.jit
def _clamp_chunk(
    address: tl.tensor,  # of `count` elements of DTYPE, read and overwritten
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    pointer = pointer_to(address, DTYPE, WHOLE)
    for start in range(0, CHUNK, BLOCK):
        if WHOLE or start < count:
            offsets = start + tl.arange(0, BLOCK)
            values = load(pointer, offsets, count, WHOLE)
            # nan compares false and stays; where the bounds cross, `high` comes last and wins.
            values = tl.where(values < low.to(values.dtype), low.to(values.dtype), values)
            values = tl.where(values > high.to(values.dtype), high.to(values.dtype), values)
            store(pointer, offsets, values, count, WHOLE)


@triton.jit
def _clamp_as(
    address: tl.tensor,
    count: tl.tensor,
    code: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if code == F16:
        _clamp_chunk(address, count, low, high, tl.float16, WHOLE, CHUNK, BLOCK)
    elif code == BF16:
        _clamp_chunk(address, count, low, high, tl.bfloat16, WHOLE, CHUNK, BLOCK)
    elif code == F32:
        _clamp_chunk(address, count, low, high, tl.float32, WHOLE, CHUNK, BLOCK)
    else:
        _clamp_chunk(address, count, low, high, tl.float64, WHOLE, CHUNK, BLOCK)


@triton.jit
def clamp_kernel(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    low: F64,
    high: F64,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Clamp in place. f32: 8 B an element (4 read, 4 written); one launch a list."""
    address, count, code, whole = row_of(rows_ptr)
    low_f64 = tl.full([], low, tl.float64)
    high_f64 = tl.full([], high, tl.float64)
    if whole == 1:
        _clamp_as(address, count, code, low_f64, high_f64, True, CHUNK, BLOCK)
    else:
        _clamp_as(address, count, code, low_f64, high_f64, False, CHUNK, BLOCK)


def launch_clamp(tensors: Sequence[Tensor], low: float, high: float) -> bool:
    """Run the kernel; False, and nothing done, where it cannot take these tensors or bounds."""
    # A nan bound makes everything nan, and one that a dtype cannot hold is torch's to refuse.
    widest = min(torch.finfo(t.dtype).max for t in tensors)
    if any(math.isnan(bound) or widest < abs(bound) < math.inf for bound in (low, high)):
        return False
    table = chunk_table(tensors)
    if table is None:
        return False
    if table.chunks:
        with on_device(table.rows):
            clamp_kernel[(table.chunks,)](table.rows, low, high, **LAUNCH)
        torch.autograd.graph.increment_version(tensors)
    return True
