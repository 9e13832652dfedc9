"""Scale a list of tensors in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from impl.kernels._table import chunk_table
from impl.kernels._triton.chunk import (
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
    address: tl.tensor,  # of `count` elements, read and overwritten
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
    """Times factor in place. f32: 8 B an element (4 read, 4 written), none when it is 1; one launch a list."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        visit_chunk(rows_ptr, _scale_chunk, (factor,), DTYPE, BLOCK)


def launch_scale(tensors: Sequence[Tensor], factor: Tensor) -> bool:
    """Run the kernel; False, and nothing done, where it cannot take these tensors."""
    table = chunk_table(tensors)
    if table is None:
        return False
    if table.chunks:
        with on_device(table.rows):
            launch(
                scale_kernel, (table.chunks,), table.rows, factor.to(table.rows.device), **shape_for(table)
            )
        torch.autograd.graph.increment_version(tensors)
    return True
