"""Scale a list of tensors in one launch."""

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
    LAUNCH,
    load,
    on_device,
    pointer_to,
    row_of,
    store,
)


@triton.jit
def _scale_chunk(
    address: tl.tensor,  # of `count` elements of DTYPE, read and overwritten
    count: tl.tensor,
    factor: tl.tensor,
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
            store(pointer, offsets, values * factor.to(values.dtype), count, WHOLE)


@triton.jit
def _scale_as(
    address: tl.tensor,
    count: tl.tensor,
    code: tl.tensor,
    factor: tl.tensor,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if code == F16:
        _scale_chunk(address, count, factor, tl.float16, WHOLE, CHUNK, BLOCK)
    elif code == BF16:
        _scale_chunk(address, count, factor, tl.bfloat16, WHOLE, CHUNK, BLOCK)
    elif code == F32:
        _scale_chunk(address, count, factor, tl.float32, WHOLE, CHUNK, BLOCK)
    else:
        _scale_chunk(address, count, factor, tl.float64, WHOLE, CHUNK, BLOCK)


@triton.jit
def scale_kernel(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    factor_ptr: tl.tensor,  # [] any float dtype
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Times factor in place. f32: 8 B an element (4 read, 4 written), none when it is 1; one launch a list."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        address, count, code, whole = row_of(rows_ptr)
        if whole == 1:
            _scale_as(address, count, code, factor, True, CHUNK, BLOCK)
        else:
            _scale_as(address, count, code, factor, False, CHUNK, BLOCK)


def launch_scale(tensors: Sequence[Tensor], factor: Tensor) -> bool:
    """Run the kernel; False, and nothing done, where it cannot take these tensors."""
    table = chunk_table(tensors)
    if table is None:
        return False
    if table.chunks:
        with on_device(table.rows):
            scale_kernel[(table.chunks,)](table.rows, factor.to(table.rows.device), **LAUNCH)
        torch.autograd.graph.increment_version(tensors)
    return True
