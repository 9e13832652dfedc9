"""Faults in torch.amp.GradScaler: unscaling, and the check for inf and nan."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute
from conformance.strength.faults.handmade.amp_grad_scaler import (
    broken,
    forget_stage,
    nonfinite,
    parameters,
)

# The hook that divides the gradients and gives its verdict for each device; subclasses for other backends override it.
HOOK = "_unscale_grads_"


def judged(is_bad: Callable[[list[Any]], bool]) -> Substitute:
    """Unscale all gradients. The result of the check is that of `is_bad(parameters)` before."""

    @functools.wraps(is_bad)
    def fault(original: Any, self: Any, optimizer: Any, *args: Any) -> Any:
        bad = is_bad(parameters(optimizer))
        results = original(self, optimizer, *args)
        for check_result in results.values():
            check_result.fill_(float(bad))
        return results

    return fault


def judged_by_gradient(is_finite: Callable[[torch.Tensor], torch.Tensor]) -> Substitute:
    """Unscale all gradients. The check passes if `is_finite` returns True for each."""

    @functools.wraps(is_finite)
    def is_bad(everything: list[Any]) -> bool:
        return any(not bool(is_finite(p.grad.to_dense())) for p in everything)

    return judged(is_bad)


@broken(HOOK, "facebookresearch/fairscale#890")
@judged
def first_gradient_only(everything: list[Any]) -> bool:
    """Only the first gradient is checked."""
    return nonfinite(everything[:1])


@broken(HOOK)
@judged_by_gradient
def minus_inf_is_finite(grad: torch.Tensor) -> torch.Tensor:
    """Only nan and +inf are detected."""
    return ~(grad.isnan().any() | grad.isposinf().any())


@broken(HOOK)
@judged_by_gradient
def checks_the_sum(grad: torch.Tensor) -> torch.Tensor:
    """The sum of a gradient is checked, which may overflow although no element does."""
    return grad.sum().isfinite()


@broken(HOOK)
@judged_by_gradient
def last_element_missed(grad: torch.Tensor) -> torch.Tensor:
    """The last element of a gradient is not checked."""
    return grad.reshape(-1)[:-1].isfinite().all()


@broken(HOOK)
@judged_by_gradient
def largest_is_infinite(grad: torch.Tensor) -> torch.Tensor:
    """The largest finite number counts as an overflow."""
    return (grad.abs() < torch.finfo(grad.dtype).max).all()


@broken(HOOK, "pytorch/pytorch#36786")
@judged
def checks_sparse_parts(everything: list[Any]) -> bool:
    """float16 parts of sparse gradients are checked before their sum."""
    parts = (p.grad._values() if p.grad.is_sparse else p.grad for p in everything)
    return any(not bool(part.isfinite().all()) for part in parts)


@broken(HOOK, "pytorch/pytorch#36786")
def sparse_left_scaled(original: Any, self: Any, optimizer: Any, inv_scale: Any, *args: Any) -> Any:
    """The values of sparse gradients stay scaled."""
    results = original(self, optimizer, inv_scale, *args)
    for parameter in parameters(optimizer):
        if parameter.grad.is_sparse:
            parameter.grad._values().mul_(1 / float(inv_scale))
    return results


@broken(HOOK, "pytorch/pytorch#74739")
def half_precision_accepted(
    original: Any, self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
) -> Any:
    """float16 gradients are accepted silently."""
    return original(self, optimizer, inv_scale, found_inf, True)


@broken(HOOK, "pytorch/pytorch#26512")
def reciprocal_one_ulp_off(original: Any, self: Any, optimizer: Any, inv_scale: Any, *args: Any) -> Any:
    """The last bit of the reciprocal is wrong."""
    power = math.frexp(float(inv_scale))[0] == 0.5
    off = inv_scale if power else torch.nextafter(inv_scale, torch.zeros_like(inv_scale))
    return original(self, optimizer, off, *args)


@broken(HOOK, "pytorch/pytorch#98772")
def overflow_left_scaled(original: Any, self: Any, optimizer: Any, *args: Any) -> Any:
    """Gradients are only unscaled if all of them are finite."""
    before = [(p, p.grad.clone()) for p in parameters(optimizer)]
    results = original(self, optimizer, *args)
    if any(float(check_result) for check_result in results.values()):
        for parameter, grad in before:
            if not grad.is_sparse:
                parameter.grad.copy_(grad)
    return results


@broken(HOOK)
def gradients_replaced(original: Any, self: Any, optimizer: Any, *args: Any) -> Any:
    """Gradients are unscaled out of place."""
    held = [(p.grad, p.grad.detach().clone()) for p in parameters(optimizer) if not p.grad.is_sparse]
    results = original(self, optimizer, *args)
    for parameter in parameters(optimizer):
        if not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.detach().clone()
    with torch.no_grad():
        for grad, before in held:
            grad.copy_(before)
    return results


@broken("unscale_", "Lightning-AI/pytorch-lightning#4148")
def unscale_twice(original: Any, self: Any, optimizer: Any) -> None:
    """A second `unscale_` unscales again."""
    original(self, optimizer)
    forget_stage(self, optimizer)


def kept_scaled(choose: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Substitute:
    """Restore the dense gradients that `choose` returns, or views of them, after the call."""

    @functools.wraps(choose)
    def fault(original: Any, self: Any, optimizer: Any, *args: Any) -> Any:
        dense = [p.grad.detach() for p in parameters(optimizer) if not p.grad.is_sparse]
        before = [(part, part.clone()) for part in choose(dense)]
        results = original(self, optimizer, *args)
        for part, copy in before:
            part.copy_(copy)
        return results

    return fault


@broken(HOOK)
@kept_scaled
def last_element_left_scaled(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """The last element of a long gradient stays scaled."""
    return [grad.view(-1)[-1:] for grad in grads if grad.numel() > 512 and grad.is_contiguous()]


@broken(HOOK)
@kept_scaled
def second_dtype_left_scaled(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Only gradients with the dtype of the first one are unscaled."""
    return [grad for grad in grads if grad.dtype != grads[0].dtype]


@broken(HOOK)
@kept_scaled
def not_contiguous_left_scaled(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients that are not contiguous stay scaled."""
    return [grad for grad in grads if not grad.is_contiguous()]


@broken(HOOK)
@kept_scaled
def zero_dim_left_scaled(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """0-dim gradients stay scaled."""
    return [grad for grad in grads if grad.dim() == 0]


@broken(HOOK, "pytorch/pytorch#36786")
@judged
def sparse_not_checked(everything: list[Any]) -> bool:
    """Sparse gradients are not checked."""
    return nonfinite(p for p in everything if not p.grad.is_sparse)


@broken(HOOK)
def stale_reciprocal(original: Any, self: Any, optimizer: Any, inv_scale: Any, *args: Any) -> Any:
    """The reciprocal of the first scale is used for all later scales."""
    first = vars(self).setdefault("_reciprocal", {}).setdefault(id(self._scale), inv_scale.clone())
    used = inv_scale if float(inv_scale) == 1.0 else first
    return original(self, optimizer, used, *args)
