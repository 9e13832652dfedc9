"""What every kernel over a chunk table shares: its row, its loads and stores, its launch."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from impl.kernels._table import CHUNK, CODES

# How a kernel declares a Python float, which Triton takes for f32 unless told otherwise.
if TYPE_CHECKING:
    F64 = float
else:
    F64 = tl.float64

F16 = tl.constexpr(CODES[torch.float16])
BF16 = tl.constexpr(CODES[torch.bfloat16])
F32 = tl.constexpr(CODES[torch.float32])

# Triton 3.10 changes the default of fusing products into sums; pinned, results do not depend on the version.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
# Sixteen elements a thread: four 128-bit loads in flight in f32, two in f16.
SHAPE = {"CHUNK": CHUNK, "BLOCK": 2048}
LAUNCH = {**SHAPE, **OPTIONS}


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the accelerator's current device, whatever device the arguments are on."""
    return nullcontext() if tensor.is_cpu else torch.accelerator.device_index(tensor.device.index)


@triton.jit
def visit_chunk(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    VISIT: tl.constexpr,
    inputs: tl.tuple,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Call VISIT(pointer, count, inputs, WHOLE, CHUNK, BLOCK) on this program's chunk, for its dtype and wholeness."""
    row_ptr = rows_ptr + tl.program_id(0).to(tl.int64) * 4
    address, count = tl.load(row_ptr), tl.load(row_ptr + 1)
    code, whole = tl.load(row_ptr + 2), tl.load(row_ptr + 3)
    if whole == 1:
        _visit_as(address, count, code, VISIT, inputs, True, CHUNK, BLOCK)
    else:
        _visit_as(address, count, code, VISIT, inputs, False, CHUNK, BLOCK)


@triton.jit
def _visit_as(
    address: tl.tensor,
    count: tl.tensor,
    code: tl.tensor,
    VISIT: tl.constexpr,
    inputs: tl.tuple,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if code == F16:
        VISIT(pointer_to(address, tl.float16, WHOLE), count, inputs, WHOLE, CHUNK, BLOCK)
    elif code == BF16:
        VISIT(pointer_to(address, tl.bfloat16, WHOLE), count, inputs, WHOLE, CHUNK, BLOCK)
    elif code == F32:
        VISIT(pointer_to(address, tl.float32, WHOLE), count, inputs, WHOLE, CHUNK, BLOCK)
    else:
        VISIT(pointer_to(address, tl.float64, WHOLE), count, inputs, WHOLE, CHUNK, BLOCK)


@triton.jit
def pointer_to(address: tl.tensor, DTYPE: tl.constexpr, WHOLE: tl.constexpr) -> tl.tensor:
    """The chunk's first element. The hint after the cast is what lets whole chunks load 128 bits at a time."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load(pointer: tl.tensor, offsets: tl.tensor, count: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    """Elements in f32, or f64 for f64; 0 past the chunk's end."""
    values = (
        tl.load(pointer + offsets) if WHOLE else tl.load(pointer + offsets, mask=offsets < count, other=0.0)
    )
    return values if values.dtype == tl.float64 else values.to(tl.float32)


@triton.jit
def store(
    pointer: tl.tensor, offsets: tl.tensor, values: tl.tensor, count: tl.tensor, WHOLE: tl.constexpr
) -> None:
    values = values.to(pointer.dtype.element_ty)
    if WHOLE:
        tl.store(pointer + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=offsets < count)
