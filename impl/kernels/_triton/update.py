"""Shared code of the rules' kernels: the loop over an update table, loads and stores.

The arithmetic is in f32. Only `tl.fma` fuses products into sums, and quotients and roots are rounded to nearest. So the
interpreter and every GPU give the same bits, except for f64 numbers that are the same for all elements of a tensor.
"""

import triton
import triton.language as tl

from impl.kernels._triton.chunk import F64, OPTIONS, load, pointer_to, store, vector_pointer_to, vectors_in
from impl.kernels._update_table import ADDRESSES, ALIGNED, COUNT, STEP

_COUNT, _ALIGNED, _STEP, _ADDRESSES = map(tl.constexpr, (COUNT, ALIGNED, STEP, ADDRESSES))

# Eight elements a thread: two 128-bit loads in flight for each list in f32, one in f16.
SHAPE = {"BLOCK": 1024}
LAUNCH = {**SHAPE, **OPTIONS, "enable_fp_fusion": False}


@triton.jit
def is_taken(found_inf_ptr: tl.tensor | None) -> tl.tensor:
    """Return whether the step is taken. Without a flag it is."""
    return tl.full([], 1, tl.int1) if found_inf_ptr is None else tl.load(found_inf_ptr) == 0.0


@triton.jit
def wide(number: F64) -> tl.tensor:
    """Convert a scalar argument to an f64 tensor. In the interpreter it is a Python float."""
    return tl.full([], number, tl.float64)


@triton.jit
def learning_rate(lr: F64, lr_ptr: tl.tensor | None) -> tl.tensor:
    return wide(lr) if lr_ptr is None else tl.load(lr_ptr).to(tl.float64)


@triton.jit
def step_of(rows_ptr: tl.tensor, LISTS: tl.constexpr) -> tl.tensor:
    """Return the step counter of this program's parameter in f64."""
    address = tl.load(_row(rows_ptr, LISTS) + _STEP)
    return tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)


@triton.jit
def _row(rows_ptr: tl.tensor, LISTS: tl.constexpr) -> tl.tensor:
    return rows_ptr + tl.program_id(0).to(tl.int64) * (_ADDRESSES + LISTS)


@triton.jit
def visit_update(
    rows_ptr: tl.tensor,  # [chunks, 3 + lists] i64: params, grads, states, copies
    factor_ptr: tl.tensor,  # [] f32 or f64: what gradients are multiplied by, as f32
    UPDATE: tl.constexpr,
    numbers: tl.tuple,
    flags: tl.tuple,
    LISTS: tl.constexpr,
    STATES: tl.constexpr,
    OWN: tl.constexpr,  # dtype of parameters
    GRADS: tl.constexpr,  # dtype
    STORED: tl.constexpr,  # dtype of states, whatever it is where there are none
    COPIES: tl.constexpr,  # dtype, whatever it is where there are none
    BLOCK: tl.constexpr,
) -> None:
    """Store UPDATE(param, grad, states, numbers, flags) for this chunk. There are always three `states`."""
    row_ptr = _row(rows_ptr, LISTS)
    count = tl.load(row_ptr + _COUNT).to(tl.int32)
    vectors = vectors_in(count, tl.load(row_ptr + _ALIGNED))
    factor = tl.load(factor_ptr).to(tl.float32)
    _update_span(
        _lists(row_ptr, vector_pointer_to, LISTS, STATES, OWN, GRADS, STORED, COPIES),
        0, vectors, UPDATE, factor, numbers, flags, STATES, LISTS > 2 + STATES, BLOCK,
    )  # fmt: skip
    _update_span(
        _lists(row_ptr, pointer_to, LISTS, STATES, OWN, GRADS, STORED, COPIES),
        vectors, count, UPDATE, factor, numbers, flags, STATES, LISTS > 2 + STATES, BLOCK,
    )  # fmt: skip


@triton.jit
def _lists(
    row_ptr: tl.tensor,
    POINTER_TO: tl.constexpr,
    LISTS: tl.constexpr,
    STATES: tl.constexpr,
    OWN: tl.constexpr,
    GRADS: tl.constexpr,
    STORED: tl.constexpr,
    COPIES: tl.constexpr,
) -> tl.tuple:
    """Return pointers to parameters, gradients, three states and copies. Absent lists point to parameters."""
    address_ptr = row_ptr + _ADDRESSES
    params = POINTER_TO(tl.load(address_ptr), OWN)
    grads = POINTER_TO(tl.load(address_ptr + 1), GRADS)
    first = POINTER_TO(tl.load(address_ptr + 2), STORED) if STATES > 0 else params
    second = POINTER_TO(tl.load(address_ptr + 3), STORED) if STATES > 1 else params
    third = POINTER_TO(tl.load(address_ptr + 4), STORED) if STATES > 2 else params
    copies = POINTER_TO(tl.load(address_ptr + 2 + STATES), COPIES) if LISTS > 2 + STATES else params
    return params, grads, first, second, third, copies


@triton.jit
def _update_span(
    lists: tl.tuple,
    start: tl.tensor,
    stop: tl.tensor,
    UPDATE: tl.constexpr,
    factor: tl.tensor,
    numbers: tl.tuple,
    flags: tl.tuple,
    STATES: tl.constexpr,
    HAS_COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    params, grads, first, second, third, copies = lists
    for block in range(start, stop, BLOCK):
        offsets = tl.arange(0, BLOCK)
        mask = offsets < stop - block
        param = load(params + block + offsets, mask)
        state1 = load(first + block + offsets, mask) if STATES > 0 else param
        state2 = load(second + block + offsets, mask) if STATES > 1 else param
        state3 = load(third + block + offsets, mask) if STATES > 2 else param
        grad = load(grads + block + offsets, mask).to(tl.float32) * factor
        param, state1, state2, state3 = UPDATE(param, grad, (state1, state2, state3), numbers, flags)
        store(params + block + offsets, param, mask)
        if STATES > 0:
            store(first + block + offsets, state1, mask)
        if STATES > 1:
            store(second + block + offsets, state2, mask)
        if STATES > 2:
            store(third + block + offsets, state3, mask)
        if HAS_COPIES:
            store(copies + block + offsets, param, mask)
