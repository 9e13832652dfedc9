"""The arithmetic of each rule in the kernels' order, with the bound of its rounding errors, and the tested settings."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from conformance.gpu.rounded import Rounded
from impl.kernels.rules import AdagradRule, AdamRule, Rule, SGDRule

_number = Rounded.number

rates = st.sampled_from([1e-3, 0.125, torch.tensor(0.01), torch.tensor(1e-4, dtype=torch.float64)])
decays = st.sampled_from([0.0, 0.1])
bools = st.booleans()
rules = st.one_of(
    st.builds(
        AdamRule, rates, st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.999]), st.sampled_from([1e-8, 1e-3]),
        decays, bools, bools, bools,
    ),
    st.builds(
        SGDRule, rates, st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.25]), decays, bools, bools, bools
    ),
    st.builds(AdagradRule, rates, st.sampled_from([0.0, 0.5]), st.sampled_from([1e-10, 1e-3]), decays, bools),
)  # fmt: skip

ADAM = AdamRule(0.01, 0.9, 0.999, 1e-3, 0.1, amsgrad=True, maximize=False, decoupled=True)
EACH = [
    ADAM,
    SGDRule(0.01, 0.5, 0.25, 0.1, nesterov=False, maximize=False, is_first_step=False),
    AdagradRule(0.01, 0.5, 1e-3, 0.1, maximize=False),
]
# All other states are sums of squares.
SIGNED_STATES = ("exp_avgs", "momentum_buffer_list")
# Settings that EACH lacks.
OTHERS = [
    AdamRule(0.01, 0.9, 0.999, 1e-3, 0.1, amsgrad=False, maximize=True, decoupled=False),
    SGDRule(0.01, 0.5, 0.25, 0.0, nesterov=True, maximize=True, is_first_step=False),
    SGDRule(0.01, 0.5, 0.25, 0.1, nesterov=False, maximize=False, is_first_step=True),
    SGDRule(0.01, 0.0, 0.0, 0.1, nesterov=False, maximize=False, is_first_step=False),
    AdagradRule(0.01, 0.5, 1e-3, 0.0, maximize=True),
]


def update(
    rule: Rule, param: Tensor, grad: Tensor, states: list[Tensor], step: float, factor: float
) -> list[Rounded]:
    """Return the new parameter and the new states, before they are stored."""
    wide = [Rounded.exactly(tensor) for tensor in (param, *states)]
    scaled = Rounded.exactly(grad) * _number(factor)
    match rule:
        case AdamRule():
            return _adam(rule, wide[0], scaled, wide[1:], step)
        case SGDRule():
            return _sgd(rule, wide[0], scaled, wide[1:])
        case AdagradRule():
            return _adagrad(rule, wide[0], scaled, wide[1], step)
        case _:
            raise AssertionError(f"no bound is known for {rule}")


def states_of(rule: Rule) -> int:
    match rule:
        case AdamRule():
            return 3 if rule.amsgrad else 2
        case SGDRule():
            return 1 if rule.momentum else 0
        case _:
            return 1


def _decayed(rule: SGDRule | AdagradRule | AdamRule, param: Rounded, grad: Rounded) -> Rounded:
    signed = -grad if rule.maximize else grad
    return signed + _number(rule.weight_decay) * param if rule.weight_decay else signed


def _adam(rule: AdamRule, param: Rounded, grad: Rounded, states: list[Rounded], step: float) -> list[Rounded]:
    lr = float(rule.lr)
    beta1, beta2 = _number(rule.beta1), _number(rule.beta2)
    if rule.decoupled:
        grad = -grad if rule.maximize else grad
        param = param - _number(lr * rule.weight_decay) * param if rule.weight_decay else param
    else:
        grad = _decayed(rule, param, grad)
    mean, square, *largest = states
    mean = beta1 * mean + _number(1.0 - rule.beta1) * grad
    square = beta2 * square + _number(1.0 - rule.beta2) * grad * grad
    largest = [maximum.maximum(square) for maximum in largest]
    root = (largest[0] if rule.amsgrad else square).sqrt()
    denominator = root / _number(math.sqrt(1.0 - rule.beta2**step)) + _number(rule.eps)
    param = param - _number(lr / (1.0 - rule.beta1**step)) * mean / denominator
    return [param, mean, square, *largest]


def _sgd(rule: SGDRule, param: Rounded, grad: Rounded, states: list[Rounded]) -> list[Rounded]:
    grad = _decayed(rule, param, grad)
    momentum = _number(rule.momentum)
    means = [
        grad if rule.is_first_step else momentum * mean + _number(1.0 - rule.dampening) * grad
        for mean in states
    ]
    if means:
        grad = grad + momentum * means[0] if rule.nesterov else means[0]
    return [param - _number(float(rule.lr)) * grad, *means]


def _adagrad(rule: AdagradRule, param: Rounded, grad: Rounded, total: Rounded, step: float) -> list[Rounded]:
    grad = _decayed(rule, param, grad)
    total = total + grad * grad
    step_size = _number(float(rule.lr) / (1.0 + (step - 1.0) * rule.lr_decay))
    return [param - step_size * grad / (total.sqrt() + _number(rule.eps)), total]
