"""Kernels of the rules, which update parameters and states in one pass from gradients that are still scaled.

Settings are scalar arguments in f64. Numbers that are the same for all elements are computed in f64 and rounded to f32
once.

LISTS is the number of lists in the update table, STATES that of the lists of states. OWN, GRADS, STORED and COPIES are
dtypes: see `visit_update`. A rule gets three states, and returns those that it does not use unchanged.
"""

import triton
import triton.language as tl

from impl.kernels._triton.chunk import F64
from impl.kernels._triton.update import is_taken, learning_rate, step_of, visit_update, wide


@triton.jit
def _adam(
    param: tl.tensor, grad: tl.tensor, states: tl.tuple, numbers: tl.tuple, flags: tl.tuple
) -> tl.tuple:
    mean, square, largest = states
    beta1, weight1, beta2, weight2, eps, decay, step_size, correction = numbers
    AMSGRAD: tl.constexpr = flags[0]
    MAXIMIZE: tl.constexpr = flags[1]
    DECAY: tl.constexpr = flags[2]
    if MAXIMIZE:
        grad = -grad
    if DECAY == "gradient":
        grad = tl.fma(decay, param, grad)
    elif DECAY == "decoupled":
        param = tl.fma(-decay, param, param)
    mean = tl.fma(beta1, mean, weight1 * grad)
    square = tl.fma(beta2, square, weight2 * grad * grad)
    largest = tl.maximum(largest, square, propagate_nan=tl.PropagateNan.ALL) if AMSGRAD else square
    denominator = tl.div_rn(tl.sqrt_rn(largest), correction) + eps
    param = param - tl.div_rn(step_size * mean, denominator)
    return param, mean, square, largest


@triton.jit
def adam_kernel(
    rows_ptr: tl.tensor,  # [chunks, 3 + lists] i64
    lr: F64,
    beta1: F64,
    beta2: F64,
    eps: F64,
    weight_decay: F64,
    lr_ptr: tl.tensor | None,  # [] any float dtype, used instead of `lr`
    factor_ptr: tl.tensor,  # [] f32 or f64
    found_inf_ptr: tl.tensor | None,  # [] f32: the step is skipped if it is not 0
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr,  # kind: "none", "gradient" or "decoupled"
    LISTS: tl.constexpr,
    STATES: tl.constexpr,
    OWN: tl.constexpr,
    GRADS: tl.constexpr,
    STORED: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Adam and AdamW. f32: 28 B an element (16 read, 12 written), 36 with the largest squares; one launch a list."""
    if is_taken(found_inf_ptr):
        step = step_of(rows_ptr, LISTS)
        rate, first, second = learning_rate(lr, lr_ptr), wide(beta1), wide(beta2)
        decay = wide(weight_decay)
        if DECAY == "decoupled":
            decay = rate * decay
        step_size = rate / (1.0 - tl.exp2(tl.log2(first) * step))
        correction = tl.sqrt(1.0 - tl.exp2(tl.log2(second) * step))
        numbers = (
            first.to(tl.float32), (1.0 - first).to(tl.float32), second.to(tl.float32), (1.0 - second).to(tl.float32),
            wide(eps).to(tl.float32), decay.to(tl.float32), step_size.to(tl.float32), correction.to(tl.float32),
        )  # fmt: skip
        visit_update(
            rows_ptr, factor_ptr, _adam, numbers, (AMSGRAD, MAXIMIZE, DECAY), LISTS, STATES, OWN, GRADS, STORED,
            COPIES, BLOCK,
        )  # fmt: skip


@triton.jit
def _sgd(param: tl.tensor, grad: tl.tensor, states: tl.tuple, numbers: tl.tuple, flags: tl.tuple) -> tl.tuple:
    mean, second, third = states
    lr, momentum, undampened, decay = numbers
    MOMENTUM_PHASE: tl.constexpr = flags[0]
    NESTEROV: tl.constexpr = flags[1]
    MAXIMIZE: tl.constexpr = flags[2]
    DECAYS: tl.constexpr = flags[3]
    if MAXIMIZE:
        grad = -grad
    if DECAYS:
        grad = tl.fma(decay, param, grad)
    if MOMENTUM_PHASE != "none":
        mean = grad if MOMENTUM_PHASE == "begins" else tl.fma(momentum, mean, undampened * grad)
        grad = tl.fma(momentum, mean, grad) if NESTEROV else mean
    return tl.fma(-lr, grad, param), mean, second, third


@triton.jit
def sgd_kernel(
    rows_ptr: tl.tensor,  # [chunks, 3 + lists] i64
    lr: F64,
    momentum: F64,
    dampening: F64,
    weight_decay: F64,
    lr_ptr: tl.tensor | None,  # [] any float dtype, used instead of `lr`
    factor_ptr: tl.tensor,  # [] f32 or f64
    found_inf_ptr: tl.tensor | None,  # [] f32: the step is skipped if it is not 0
    MOMENTUM_PHASE: tl.constexpr,  # phase: "none", "begins" or "goes_on"
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECAYS: tl.constexpr,
    LISTS: tl.constexpr,
    STATES: tl.constexpr,
    OWN: tl.constexpr,
    GRADS: tl.constexpr,
    STORED: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """SGD. f32: 12 B an element (8 read, 4 written), 20 with momentum; one launch a list."""
    if is_taken(found_inf_ptr):
        numbers = (
            learning_rate(lr, lr_ptr).to(tl.float32), wide(momentum).to(tl.float32),
            (1.0 - wide(dampening)).to(tl.float32), wide(weight_decay).to(tl.float32),
        )  # fmt: skip
        visit_update(
            rows_ptr, factor_ptr, _sgd, numbers, (MOMENTUM_PHASE, NESTEROV, MAXIMIZE, DECAYS), LISTS, STATES, OWN,
            GRADS, STORED, COPIES, BLOCK,
        )  # fmt: skip


@triton.jit
def _adagrad(
    param: tl.tensor, grad: tl.tensor, states: tl.tuple, numbers: tl.tuple, flags: tl.tuple
) -> tl.tuple:
    total, second, third = states
    step_size, eps, decay = numbers
    MAXIMIZE: tl.constexpr = flags[0]
    DECAYS: tl.constexpr = flags[1]
    if MAXIMIZE:
        grad = -grad
    if DECAYS:
        grad = tl.fma(decay, param, grad)
    total = tl.fma(grad, grad, total)
    param = param - tl.div_rn(step_size * grad, tl.sqrt_rn(total) + eps)
    return param, total, second, third


@triton.jit
def adagrad_kernel(
    rows_ptr: tl.tensor,  # [chunks, 3 + lists] i64
    lr: F64,
    lr_decay: F64,
    eps: F64,
    weight_decay: F64,
    lr_ptr: tl.tensor | None,  # [] any float dtype, used instead of `lr`
    factor_ptr: tl.tensor,  # [] f32 or f64
    found_inf_ptr: tl.tensor | None,  # [] f32: the step is skipped if it is not 0
    MAXIMIZE: tl.constexpr,
    DECAYS: tl.constexpr,
    LISTS: tl.constexpr,
    STATES: tl.constexpr,
    OWN: tl.constexpr,
    GRADS: tl.constexpr,
    STORED: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Adagrad. f32: 20 B an element (12 read, 8 written); one launch a list."""
    if is_taken(found_inf_ptr):
        step = step_of(rows_ptr, LISTS)
        step_size = learning_rate(lr, lr_ptr) / (1.0 + (step - 1.0) * wide(lr_decay))
        numbers = step_size.to(tl.float32), wide(eps).to(tl.float32), wide(weight_decay).to(tl.float32)
        visit_update(
            rows_ptr, factor_ptr, _adagrad, numbers, (MAXIMIZE, DECAYS), LISTS, STATES, OWN, GRADS, STORED,
            COPIES, BLOCK,
        )  # fmt: skip
