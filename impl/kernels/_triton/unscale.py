"""Unscaling and check of a list of gradients in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from impl.kernels._native.memory import TensorList
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
def inverse(scale: tl.tensor) -> tl.tensor:
    """Return `1 / scale`, rounded to nearest like `impl.kernels.inverse`."""
    return tl.div_rn(tl.full([], 1.0, tl.float32), scale)


@triton.jit
def _unscale_chunk(
    address: tl.tensor,  # address of `count` elements, read and overwritten
    DTYPE: tl.constexpr,
    vectors: tl.tensor,
    count: tl.tensor,
    inputs: tl.tuple,
    BLOCK: tl.constexpr,
) -> None:
    scale_ptr, found_inf_ptr = inputs[0], inputs[1]
    IS_INVERSE: tl.constexpr = inputs[2]
    inv_scale = tl.load(scale_ptr) if IS_INVERSE else inverse(tl.load(scale_ptr))
    bad = _unscale_span(vector_pointer_to(address, DTYPE), 0, vectors, inv_scale, BLOCK)
    bad |= _unscale_span(pointer_to(address, DTYPE), vectors, count, inv_scale, BLOCK)
    tl.store(found_inf_ptr, 1.0, mask=bad == 1)


@triton.jit
def _unscale_span(
    pointer: tl.tensor, start: tl.tensor, stop: tl.tensor, inv_scale: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return 1 if an element is inf or nan, else 0."""
    bad = tl.zeros([BLOCK], tl.int32)
    for block in range(start, stop, BLOCK):
        offsets = tl.arange(0, BLOCK)
        values = load(pointer + block + offsets, offsets < stop - block)
        # nan compares false.
        bad |= tl.where(tl.abs(values) < float("inf"), 0, 1)
        store(pointer + block + offsets, values * inv_scale, offsets < stop - block)
    return tl.max(bad, axis=0)


@triton.jit
def unscale_kernel(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    scale_ptr: tl.tensor,  # [] f32, the loss scale or its inverse
    found_inf_ptr: tl.tensor,  # [] f32, set to 1.0 on inf or nan, never cleared here
    IS_INVERSE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Multiply by the inverse scale in place. f32: 8 B an element (4 read, 4 written); one launch a list."""
    visit_chunk(rows_ptr, _unscale_chunk, (scale_ptr, found_inf_ptr, IS_INVERSE), DTYPE, BLOCK)


def launch_unscale(grads: TensorList, scale: Tensor, found_inf: Tensor, is_inverse: bool) -> bool:
    """Run the kernel. Return False, without a change, if it does not support the gradients."""
    table = chunk_table(grads)
    if table is None:
        return False
    if table.chunks:
        with on_device(found_inf):
            launch(
                unscale_kernel, (table.chunks,), table.rows, scale, found_inf,
                IS_INVERSE=is_inverse, **shape_for(table),
            )  # fmt: skip
        torch.autograd.graph.increment_version(grads.tensors)
    return True
