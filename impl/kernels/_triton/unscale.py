"""Unscale and check a list of gradients in one launch."""

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
def _unscale_chunk(
    address: tl.tensor,  # of `count` elements of DTYPE, read and overwritten
    count: tl.tensor,
    inv_scale_ptr: tl.tensor,
    found_inf_ptr: tl.tensor,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    pointer = pointer_to(address, DTYPE, WHOLE)
    inv_scale = tl.load(inv_scale_ptr)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        if WHOLE or start < count:
            offsets = start + tl.arange(0, BLOCK)
            values = load(pointer, offsets, count, WHOLE)
            # nan compares false.
            bad |= tl.where(tl.abs(values) < float("inf"), 0, 1)
            store(pointer, offsets, values * inv_scale, count, WHOLE)
    tl.store(found_inf_ptr, 1.0, mask=tl.max(bad, axis=0) == 1)


@triton.jit
def _unscale_as(
    address: tl.tensor,
    count: tl.tensor,
    code: tl.tensor,
    inv_scale_ptr: tl.tensor,
    found_inf_ptr: tl.tensor,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if code == F16:
        _unscale_chunk(address, count, inv_scale_ptr, found_inf_ptr, tl.float16, WHOLE, CHUNK, BLOCK)
    elif code == BF16:
        _unscale_chunk(address, count, inv_scale_ptr, found_inf_ptr, tl.bfloat16, WHOLE, CHUNK, BLOCK)
    elif code == F32:
        _unscale_chunk(address, count, inv_scale_ptr, found_inf_ptr, tl.float32, WHOLE, CHUNK, BLOCK)
    else:
        _unscale_chunk(address, count, inv_scale_ptr, found_inf_ptr, tl.float64, WHOLE, CHUNK, BLOCK)


@triton.jit
def unscale_kernel(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    inv_scale_ptr: tl.tensor,  # [] f32
    found_inf_ptr: tl.tensor,  # [] f32, set to 1.0 on inf or nan, never cleared here
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Times inv_scale in place. f32: 8 B an element (4 read, 4 written); one launch a list."""
    address, count, code, whole = row_of(rows_ptr)
    if whole == 1:
        _unscale_as(address, count, code, inv_scale_ptr, found_inf_ptr, True, CHUNK, BLOCK)
    else:
        _unscale_as(address, count, code, inv_scale_ptr, found_inf_ptr, False, CHUNK, BLOCK)


def launch_unscale(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> bool:
    """Run the kernel; False, and nothing done, where it cannot take these gradients."""
    table = chunk_table(grads)
    if table is None:
        return False
    if table.chunks:
        with on_device(found_inf):
            unscale_kernel[(table.chunks,)](table.rows, inv_scale, found_inf, **LAUNCH)
        torch.autograd.graph.increment_version(grads)
    return True
