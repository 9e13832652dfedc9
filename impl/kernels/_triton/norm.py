"""P-norm of a list of tensors in two launches, and the numbers of a step in the same two.

The norms of the single tensors take a third launch, which reads the results of the first.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import KernelInterface

from impl.kernels._native.memory import TensorList
from impl.kernels._table import ChunkTable, chunk_table
from impl.kernels._triton.chunk import (
    F64,
    OPTIONS,
    load,
    on_device,
    pointer_to,
    shape_for,
    vector_pointer_to,
    visit_chunk,
)
from impl.kernels._triton.launch import launch
from impl.kernels._triton.scale import clip_coefficient
from impl.kernels._triton.unscale import inverse

# A single program reads all partials. For the 15,000 of GPT-2, blocks of 1,024 by 4 warps take 24 µs on an H100.
FINISH_SHAPE = {"BLOCK": 4096}
FINISH_OPTIONS = {**OPTIONS, "num_warps": 16}
# A program of each tensor reads the partials of its chunks.
TENSOR_SHAPE = {"BLOCK": 512}

_F32, _F64 = tl.constexpr(tl.float32), tl.constexpr(tl.float64)


@triton.jit
def _is_nan(values: tl.tensor) -> tl.tensor:
    return values != values  # noqa: PLR0124  which is what a nan is


@triton.jit
def _combine(sums: tl.tensor, values: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Combine elementwise. NaN stays NaN."""
    if KIND == "largest":
        return tl.where((values > sums) | _is_nan(values), values, sums)
    elif KIND == "smallest":
        return tl.where((values < sums) | _is_nan(values), values, sums)
    else:
        return sums + values


@triton.jit
def _reduce(sums: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Reduce [BLOCK] to one number by a fixed tree, so that the result is reproducible."""
    saw_nan = tl.max(tl.where(_is_nan(sums), 1, 0), axis=0) == 1
    if KIND == "largest":
        return tl.where(saw_nan, float("nan"), tl.max(sums, axis=0))
    elif KIND == "smallest":
        return tl.where(saw_nan, float("nan"), tl.min(sums, axis=0))
    else:
        return tl.sum(sums, axis=0)


@triton.jit
def _norm_chunk(
    address: tl.tensor,  # address of `count` elements, read
    DTYPE: tl.constexpr,
    vectors: tl.tensor,
    count: tl.tensor,
    inputs: tl.tuple,
    BLOCK: tl.constexpr,
) -> None:
    partial_ptr, p = inputs[0], inputs[1]
    KIND: tl.constexpr = inputs[2]
    most = _norm_span(vector_pointer_to(address, DTYPE), 0, vectors, p, KIND, BLOCK)
    rest = _norm_span(pointer_to(address, DTYPE), vectors, count, p, KIND, BLOCK)
    tl.store(partial_ptr + tl.program_id(0), _combine(most, rest, KIND).to(tl.float64))


@triton.jit
def _norm_span(
    pointer: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    p: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    # In f64 no square of an f32 overflows or underflows. An extreme is exact in f32, which takes fewer instructions.
    IS_EXTREME: tl.constexpr = KIND == "largest" or KIND == "smallest"  # noqa: PLR1714  Triton knows no sets
    WIDE: tl.constexpr = _F32 if IS_EXTREME and pointer.dtype.element_ty != tl.float64 else _F64
    sums = tl.full([BLOCK], float("inf") if KIND == "smallest" else 0.0, WIDE)
    for block in range(start, stop, BLOCK):
        offsets = tl.arange(0, BLOCK)
        values = tl.abs(load(pointer + block + offsets, offsets < stop - block)).to(WIDE)
        if KIND == "two":
            values = values * values
        elif KIND == "power":
            values = tl.exp2(tl.log2(values) * p)
        if KIND == "power" or KIND == "smallest":  # noqa: PLR1714  Triton knows no sets
            sums = tl.where(offsets < stop - block, _combine(sums, values, KIND), sums)
        else:  # masked elements are 0, which changes no sum
            sums = _combine(sums, values, KIND)
    return _reduce(sums, KIND)


@triton.jit
def partial_norm_kernel(
    rows_ptr: tl.tensor,  # [chunks, 4] i64
    partial_ptr: tl.tensor,  # [chunks] f64, fully written
    p: F64,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one partial a chunk: the sum of |x|**p, or an extreme. f32: 4 B an element, read."""
    visit_chunk(rows_ptr, _norm_chunk, (partial_ptr, p, KIND), DTYPE, BLOCK)


@triton.jit
def _norm_of_partials(
    partial_ptr: tl.tensor, chunks: tl.tensor, p: F64, KIND: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Combine the partials, always in the same order, and take the root, in f64."""
    neutral = float("inf") if KIND == "smallest" else 0.0
    sums = tl.full([BLOCK], neutral, tl.float64)
    start = tl.full([], 0, tl.int32)
    while start < chunks:
        offsets = start + tl.arange(0, BLOCK)
        partials = tl.load(partial_ptr + offsets, mask=offsets < chunks, other=neutral)
        sums = _combine(sums, partials, KIND)
        start += BLOCK
    norm = _reduce(sums, KIND)
    if KIND == "two":
        norm = tl.sqrt(norm)
    elif KIND == "power":
        norm = tl.exp2(tl.log2(norm) / p)
    return norm


@triton.jit
def finish_norm_kernel(
    partial_ptr: tl.tensor,  # [chunks] f64
    norm_ptr: tl.tensor,  # [] any float dtype, written
    found_inf_ptr: tl.tensor | None,  # [] f32, written: 1.0 if the f64 norm is inf or nan
    chunks: tl.tensor,
    p: F64,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Take the norm and its check in one program. 8 B a chunk, read."""
    norm = _norm_of_partials(partial_ptr, chunks, p, KIND, BLOCK)
    if found_inf_ptr is not None:
        tl.store(found_inf_ptr, tl.where(tl.abs(norm) < float("inf"), 0.0, 1.0))
    if norm_ptr.dtype.element_ty != tl.float64:
        norm = norm.to(tl.float32)
    tl.store(norm_ptr, norm.to(norm_ptr.dtype.element_ty))


@triton.jit
def finish_step_kernel(
    partial_ptr: tl.tensor,  # [chunks] f64
    scale_ptr: tl.tensor,  # [] f32, the loss scale
    scaled_norm_ptr: tl.tensor,  # [] f32 or narrower; written, like all below
    found_inf_ptr: tl.tensor,  # [] f32
    norm_ptr: tl.tensor,  # [] of the dtype of the scaled norm
    factor_ptr: tl.tensor,  # [] f32
    taken_ptr: tl.tensor,  # [] f32
    chunks: tl.tensor,
    p: F64,
    max_norm: F64,
    CLIPS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute `StepNumbers` in one program, rounded like torch's operators: no sum is fused. 8 B a chunk, read."""
    wide = _norm_of_partials(partial_ptr, chunks, p, KIND, BLOCK)
    is_finite = tl.abs(wide) < float("inf")
    tl.store(found_inf_ptr, tl.where(is_finite, 0.0, 1.0))
    tl.store(taken_ptr, tl.where(is_finite, 1.0, 0.0))
    own = norm_ptr.dtype.element_ty
    scaled_norm = wide.to(tl.float32).to(own)
    tl.store(scaled_norm_ptr, scaled_norm)
    factor = inverse(tl.load(scale_ptr))
    norm = (scaled_norm.to(tl.float32) * factor).to(own)
    tl.store(norm_ptr, norm)
    if CLIPS:
        factor = factor * clip_coefficient(norm, tl.full([], max_norm, tl.float64))
    tl.store(factor_ptr, factor)


@triton.jit
def tensor_norms_kernel(
    partial_ptr: tl.tensor,  # [chunks] f64
    first_ptr: tl.tensor,  # [tensors + 1] i64: first chunk of each tensor
    norm_ptr: tl.tensor,  # [tensors] f64, fully written
    scale_ptr: tl.tensor | None,  # [] f32, the loss scale, which the norms are divided by
    p: F64,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Take the norm of each tensor, one program a tensor. 8 B a chunk, read."""
    tensor = tl.program_id(0)
    first = tl.load(first_ptr + tensor)
    chunks = (tl.load(first_ptr + tensor + 1) - first).to(tl.int32)
    norm = _norm_of_partials(partial_ptr + first, chunks, p, KIND, BLOCK)
    if scale_ptr is not None:
        norm = norm * inverse(tl.load(scale_ptr)).to(tl.float64)
    tl.store(norm_ptr + tensor, norm)


def _kind(p: float) -> str:
    return {1.0: "one", 2.0: "two", math.inf: "largest", -math.inf: "smallest"}.get(p, "power")


def launch_norm(
    tensors: TensorList,
    norm_type: float,
    dtype: torch.dtype,
    found_inf: Tensor | None = None,
    norm_T: Tensor | None = None,
) -> Tensor | None:
    """Run the kernels and return the norm, or None if they do not support the tensors or the norm.

    Only the partials, one f64 a chunk, are allocated beside the result. `found_inf` (f32, 0-dim) is set to 1.0 if the
    norm is inf or nan before it is rounded to `dtype`, else to 0.0. `norm_T` (f64) gets the norm of each tensor.
    """
    table = _table_for(tensors, norm_type)
    if table is None:
        return None
    partials = _partials_of(tensors, norm_type, table)
    norm = torch.empty((), dtype=dtype, device=partials.device)
    _finish(finish_norm_kernel, partials, norm_type, norm, found_inf)
    if norm_T is not None:
        _finish_tensors(partials, norm_type, table, norm_T, None)
    return norm


def launch_step_norm(
    tensors: TensorList,
    norm_type: float,
    dtype: torch.dtype,
    scale: Tensor,
    max_norm: float,
    norm_T: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """Run the kernels and return the fields of `StepNumbers`, or None if they do not support the tensors or the norm.

    `dtype` is not f64. `norm_T` (f64) gets the norm of each unscaled tensor.
    """
    table = _table_for(tensors, norm_type)
    if table is None:
        return None
    partials = _partials_of(tensors, norm_type, table)

    def number(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((), dtype=dtype, device=scale.device)

    numbers = number(dtype), number(), number(dtype), number(), number()
    _finish(
        finish_step_kernel, partials, norm_type, scale, *numbers,
        more=(max_norm,), CLIPS=max_norm < math.inf, enable_fp_fusion=False,
    )  # fmt: skip
    if norm_T is not None:
        _finish_tensors(partials, norm_type, table, norm_T, scale)
    return numbers


def _table_for(tensors: TensorList, norm_type: float) -> ChunkTable | None:
    """Return the table of the first launch, or None if the kernels do not support the tensors or the norm."""
    # torch's norm of order 0 counts tensors, and for an empty one it refuses orders without a neutral element.
    if norm_type == 0 or math.isnan(norm_type):
        return None
    if (norm_type < 0 or norm_type == math.inf) and not all(t.numel() for t in tensors.tensors):
        return None
    return chunk_table(tensors)


def _partials_of(tensors: TensorList, norm_type: float, table: ChunkTable) -> Tensor:
    """Launch the first kernel and return its result."""
    partials = torch.empty(table.chunks, dtype=torch.float64, device=tensors.tensors[0].device)
    if table.chunks:
        with on_device(partials):
            launch(
                partial_norm_kernel,
                (table.chunks,),
                table.rows,
                partials,
                norm_type,
                KIND=_kind(norm_type),
                **shape_for(table),
            )
    return partials


def _finish(
    kernel: KernelInterface[Any],
    partials: Tensor,
    norm_type: float,
    *tensors: Tensor | None,
    more: tuple[float, ...] = (),
    **constants: object,
) -> None:
    constants |= {"KIND": _kind(norm_type), **FINISH_SHAPE}
    with on_device(partials):
        launch(
            kernel, (1,), partials, *tensors, len(partials), norm_type, *more, **(FINISH_OPTIONS | constants)
        )


def _finish_tensors(
    partials: Tensor, norm_type: float, table: ChunkTable, norm_T: Tensor, scale: Tensor | None
) -> None:
    with on_device(partials):
        launch(
            tensor_norms_kernel, (len(norm_T),), partials, table.firsts, norm_T, scale, norm_type,
            KIND=_kind(norm_type), **TENSOR_SHAPE, **OPTIONS,
        )  # fmt: skip
