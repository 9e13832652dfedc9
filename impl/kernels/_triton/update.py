"""What every rule's kernel shares: the walk over an update table, its loads and stores.

The arithmetic is in f32 and to be read in the kernels as it is: products are fused into sums where `tl.fma` stands and
nowhere else, quotients and roots are rounded to nearest. So the interpreter and every GPU give the same bits but for
the f64 numbers that hold for a whole tensor.
"""

import triton
import triton.language as tl

from impl.kernels._table import CHUNK
from impl.kernels._triton.chunk import OPTIONS, load, pointer_to, store
from impl.kernels._update_table import ADDRESSES, COUNT, STEP, WHOLE

_COUNT, _WHOLE, _STEP, _ADDRESSES = map(tl.constexpr, (COUNT, WHOLE, STEP, ADDRESSES))

# Eight elements a thread: two 128-bit loads in flight for each list in f32, one in f16.
SHAPE = {"CHUNK": CHUNK, "BLOCK": 1024}
LAUNCH = {**SHAPE, **OPTIONS, "enable_fp_fusion": False}


@triton.jit
def is_taken(found_inf_ptr: tl.tensor | None) -> tl.tensor:
    """Whether the step is; it is where there is no flag."""
    return tl.full([], 1, tl.int1) if found_inf_ptr is None else tl.load(found_inf_ptr) == 0.0


@triton.jit
def step_of(rows_ptr: tl.tensor, LISTS: tl.constexpr) -> tl.tensor:
    """The counter of this program's parameter, in f64."""
    address = tl.load(_row(rows_ptr, LISTS) + _STEP)
    return tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)


@triton.jit
def _row(rows_ptr: tl.tensor, LISTS: tl.constexpr) -> tl.tensor:
    return rows_ptr + tl.program_id(0).to(tl.int64) * (_ADDRESSES + LISTS)


@triton.jit
def visit_update(
    rows_ptr: tl.tensor,  # [chunks, 3 + lists] i64; lists: parameters, gradients, states, copies
    factor_ptr: tl.tensor,  # [] f32 or f64: what gradients are multiplied by, as f32
    UPDATE: tl.constexpr,
    numbers: tl.tuple,
    flags: tl.tuple,
    LISTS: tl.constexpr,
    STATES: tl.constexpr,
    OWN: tl.constexpr,  # dtype of parameters and states
    GRADS: tl.constexpr,  # dtype
    COPIES: tl.constexpr,  # dtype, whatever it is where there are none
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store UPDATE(param, grad, states, numbers, flags), of which `states` are always three, for this chunk."""
    row_ptr = _row(rows_ptr, LISTS)
    factor = tl.load(factor_ptr).to(tl.float32)
    if tl.load(row_ptr + _WHOLE) == 1:
        _visit(row_ptr, factor, UPDATE, numbers, flags, LISTS, STATES, OWN, GRADS, COPIES, True, CHUNK, BLOCK)
    else:
        _visit(
            row_ptr, factor, UPDATE, numbers, flags, LISTS, STATES, OWN, GRADS, COPIES, False, CHUNK, BLOCK
        )


@triton.jit
def _visit(
    row_ptr: tl.tensor,
    factor: tl.tensor,
    UPDATE: tl.constexpr,
    numbers: tl.tuple,
    flags: tl.tuple,
    LISTS: tl.constexpr,
    STATES: tl.constexpr,
    OWN: tl.constexpr,
    GRADS: tl.constexpr,
    COPIES: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    count = tl.load(row_ptr + _COUNT)
    params = _list(row_ptr, 0, OWN, WHOLE)
    grads = _list(row_ptr, 1, GRADS, WHOLE)
    # Where a rule has fewer states, parameters stand in for the pointers and values that nothing uses.
    first = _list(row_ptr, 2, OWN, WHOLE) if STATES > 0 else params
    second = _list(row_ptr, 3, OWN, WHOLE) if STATES > 1 else params
    third = _list(row_ptr, 4, OWN, WHOLE) if STATES > 2 else params
    copies = _list(row_ptr, 2 + STATES, COPIES, WHOLE) if LISTS > 2 + STATES else params
    for start in range(0, CHUNK, BLOCK):
        if WHOLE or start < count:
            offsets = start + tl.arange(0, BLOCK)
            param = load(params, offsets, count, WHOLE)
            one = load(first, offsets, count, WHOLE) if STATES > 0 else param
            two = load(second, offsets, count, WHOLE) if STATES > 1 else param
            three = load(third, offsets, count, WHOLE) if STATES > 2 else param
            grad = load(grads, offsets, count, WHOLE).to(tl.float32) * factor
            param, one, two, three = UPDATE(param, grad, (one, two, three), numbers, flags)
            store(params, offsets, param, count, WHOLE)
            if STATES > 0:
                store(first, offsets, one, count, WHOLE)
            if STATES > 1:
                store(second, offsets, two, count, WHOLE)
            if STATES > 2:
                store(third, offsets, three, count, WHOLE)
            if LISTS > 2 + STATES:
                store(copies, offsets, param, count, WHOLE)


@triton.jit
def _list(row_ptr: tl.tensor, PLACE: tl.constexpr, DTYPE: tl.constexpr, WHOLE: tl.constexpr) -> tl.tensor:
    return pointer_to(tl.load(row_ptr + _ADDRESSES + PLACE), DTYPE, WHOLE)
