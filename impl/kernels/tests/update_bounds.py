"""The updates of the rules in the order in which the kernels do them, with the bound that their roundings add up to."""

from __future__ import annotations

import math

from torch import Tensor

from impl.kernels import AdagradRule, AdamRule, Rule, SGDRule
from impl.kernels.tests.rounded import Rounded

_number = Rounded.number


def update(
    rule: Rule, param: Tensor, grad: Tensor, states: list[Tensor], step: float, factor: float
) -> list[Rounded]:
    """The new parameter and the new states, before they are stored."""
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
    largest = [some.maximum(square) for some in largest]
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
