"""Shared code of kernels over a chunk table: rows, loads, stores and launch options."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from impl.kernels._table import CODES, ChunkTable

# Declaration of a Python float in f64, which Triton would otherwise pass as f32.
if TYPE_CHECKING:
    F64 = float
else:
    F64 = tl.float64

F16 = tl.constexpr(CODES[torch.float16])
BF16 = tl.constexpr(CODES[torch.bfloat16])
F32 = tl.constexpr(CODES[torch.float32])
DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

# Triton 3.10 changes the default of fusing products into sums; pinned, results do not depend on the version.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
# Sixteen elements a thread: four 128-bit loads in flight in f32, two in f16.
SHAPE = {"BLOCK": 2048}
LAUNCH = {**SHAPE, **OPTIONS}
# The elements of 128 bits of the narrowest dtype.
_VECTOR = tl.constexpr(8)


def shape_for(table: ChunkTable) -> dict[str, object]:
    """Return the constants and options of a kernel over `table`. One dtype takes half of the registers of all four."""
    return {**LAUNCH, "DTYPE": None if table.dtype is None else DTYPES[table.dtype]}


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, because Triton launches on the current device."""
    return nullcontext() if tensor.is_cpu else torch.accelerator.device_index(tensor.device.index)


@triton.jit
def visit_chunk(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    VISIT: tl.constexpr,
    inputs: tl.tuple,
    DTYPE: tl.constexpr | None,  # dtype of all tensors, or None if mixed
    BLOCK: tl.constexpr,
) -> None:
    """Call VISIT(address, DTYPE, vectors, count, inputs, BLOCK) on this program's chunk, in its dtype.

    The first `vectors` elements can be accessed 128 bits at a time, by `vector_pointer_to`.
    """
    row_ptr = rows_ptr + tl.program_id(0).to(tl.int64) * 4
    address, count = tl.load(row_ptr), tl.load(row_ptr + 1).to(tl.int32)
    vectors = vectors_in(count, tl.load(row_ptr + 3))
    if DTYPE is not None:
        VISIT(address, DTYPE, vectors, count, inputs, BLOCK)
    else:
        code = tl.load(row_ptr + 2)
        if code == F16:
            VISIT(address, tl.float16, vectors, count, inputs, BLOCK)
        elif code == BF16:
            VISIT(address, tl.bfloat16, vectors, count, inputs, BLOCK)
        elif code == F32:
            VISIT(address, tl.float32, vectors, count, inputs, BLOCK)
        else:
            VISIT(address, tl.float64, vectors, count, inputs, BLOCK)


@triton.jit
def vectors_in(count: tl.tensor, is_aligned: tl.tensor) -> tl.tensor:
    """Return how many elements of a chunk make up complete vectors at aligned addresses."""
    # A mask whose bound is a product with the vector's size is known to be constant within each vector.
    return count // _VECTOR * is_aligned.to(tl.int32) * _VECTOR


@triton.jit
def pointer_to(address: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    return address.to(tl.pointer_type(DTYPE))


@triton.jit
def vector_pointer_to(address: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    # A hint counts only in the function that makes the pointer.
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def load(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load elements as f32, or f64 for f64. Masked elements are 0."""
    values = tl.load(pointers, mask=mask, other=0.0)
    return values if values.dtype == tl.float64 else values.to(tl.float32)


@triton.jit
def store(pointers: tl.tensor, values: tl.tensor, mask: tl.tensor) -> None:
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
