"""Scale a list of tensors in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from impl.kernels._table import chunk_table
from impl.kernels._triton.chunk import LAUNCH, load, on_device, store, visit_chunk
from impl.kernels._triton.launch import launch


@triton.jit
def _scale_chunk(
    pointer: tl.tensor,  # to `count` elements, read and overwritten
    count: tl.tensor,
    inputs: tl.tuple,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    (factor,) = inputs
    for start in range(0, CHUNK, BLOCK):
        if WHOLE or start < count:
            offsets = start + tl.arange(0, BLOCK)
            values = load(pointer, offsets, count, WHOLE)
            store(pointer, offsets, values * factor.to(values.dtype), count, WHOLE)


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
        visit_chunk(rows_ptr, _scale_chunk, (factor,), CHUNK, BLOCK)


def launch_scale(tensors: Sequence[Tensor], factor: Tensor) -> bool:
    """Run the kernel; False, and nothing done, where it cannot take these tensors."""
    table = chunk_table(tensors)
    if table is None:
        return False
    if table.chunks:
        with on_device(table.rows):
            launch(scale_kernel, (table.chunks,), table.rows, factor.to(table.rows.device), **LAUNCH)
        torch.autograd.graph.increment_version(tensors)
    return True
