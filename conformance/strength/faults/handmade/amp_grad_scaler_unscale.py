"""Faults in torch.amp.GradScaler: how gradients are unscaled and looked at for inf and nan."""

from __future__ import annotations

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
    """All gradients are unscaled; the verdict is what `is_bad(parameters)` said before."""

    def fault(original: Any, self: Any, optimizer: Any, *args: Any) -> Any:
        bad = is_bad(parameters(optimizer))
        results = original(self, optimizer, *args)
        for check_result in results.values():
            check_result.fill_(float(bad))
        return results

    return fault


def seen(keep: Callable[[list[Any]], list[Any]]) -> Substitute:
    """Only the gradients that `keep` leaves are looked at."""
    return judged(lambda everything: nonfinite(keep(everything)))


def finite_by(finite: Callable[[torch.Tensor], torch.Tensor]) -> Substitute:
    """A gradient is finite when `finite` says so."""
    return judged(lambda everything: any(not bool(finite(p.grad.to_dense())) for p in everything))


broken("first_gradient_only", HOOK, "only the first gradient is looked at", "facebookresearch/fairscale#890")(
    seen(lambda everything: everything[:1])
)
broken("minus_inf_is_finite", HOOK, "only nan and +inf are looked for")(
    finite_by(lambda grad: ~(grad.isnan().any() | grad.isposinf().any()))
)
broken("checks_the_sum", HOOK, "the gradient's sum is looked at, which overflows where no element does")(
    finite_by(lambda grad: grad.sum().isfinite())
)
broken("last_element_missed", HOOK, "a gradient's last element is not looked at")(
    finite_by(lambda grad: grad.reshape(-1)[:-1].isfinite().all())
)


@broken(
    "checks_sparse_parts",
    HOOK,
    "sparse float16 parts are looked at before their sum",
    "pytorch/pytorch#36786",
)
@judged
def checks_sparse_parts(everything: list[Any]) -> bool:
    parts = (p.grad._values() if p.grad.is_sparse else p.grad for p in everything)
    return any(not bool(part.isfinite().all()) for part in parts)


@broken("sparse_left_scaled", HOOK, "the values of sparse gradients stay scaled", "pytorch/pytorch#36786")
def sparse_left_scaled(original: Any, self: Any, optimizer: Any, inv_scale: Any, *args: Any) -> Any:
    results = original(self, optimizer, inv_scale, *args)
    for parameter in parameters(optimizer):
        if parameter.grad.is_sparse:
            parameter.grad._values().mul_(1 / float(inv_scale))
    return results


@broken("half_precision_taken", HOOK, "float16 gradients are taken in silence", "pytorch/pytorch#74739")
def half_precision_taken(
    original: Any, self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
) -> Any:
    return original(self, optimizer, inv_scale, found_inf, True)


@broken("coarse_reciprocal", HOOK, "the scale's reciprocal is rounded to bfloat16", "pytorch/pytorch#26512")
def coarse_reciprocal(original: Any, self: Any, optimizer: Any, inv_scale: Any, *args: Any) -> Any:
    return original(self, optimizer, inv_scale.bfloat16().float(), *args)


@broken("reciprocal_one_ulp_off", HOOK, "the reciprocal is off by its last bit", "pytorch/pytorch#26512")
def reciprocal_one_ulp_off(original: Any, self: Any, optimizer: Any, inv_scale: Any, *args: Any) -> Any:
    power = math.frexp(float(inv_scale))[0] == 0.5
    off = inv_scale if power else torch.nextafter(inv_scale, torch.zeros_like(inv_scale))
    return original(self, optimizer, off, *args)


@broken(
    "overflow_left_scaled",
    HOOK,
    "gradients are unscaled only when all are finite",
    "pytorch/pytorch#98772",
)
def overflow_left_scaled(original: Any, self: Any, optimizer: Any, *args: Any) -> Any:
    before = [(p, p.grad.clone()) for p in parameters(optimizer)]
    results = original(self, optimizer, *args)
    if any(float(check_result) for check_result in results.values()):
        for parameter, grad in before:
            if not grad.is_sparse:
                parameter.grad.copy_(grad)
    return results


@broken("gradients_replaced", HOOK, "gradients are unscaled out of place")
def gradients_replaced(original: Any, self: Any, optimizer: Any, *args: Any) -> Any:
    held = [(p.grad, p.grad.detach().clone()) for p in parameters(optimizer) if not p.grad.is_sparse]
    results = original(self, optimizer, *args)
    for parameter in parameters(optimizer):
        if not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.detach().clone()
    with torch.no_grad():
        for grad, before in held:
            grad.copy_(before)
    return results


@broken(
    "unscale_twice", "unscale_", "a second unscale_ unscales again", "Lightning-AI/pytorch-lightning#4148"
)
def unscale_twice(original: Any, self: Any, optimizer: Any) -> None:
    original(self, optimizer)
    forget_stage(self, optimizer)


def kept_scaled(choose: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Substitute:
    """Restore the dense gradients that `choose` returns, or views of them, after the call."""

    def fault(original: Any, self: Any, optimizer: Any, *args: Any) -> Any:
        dense = [p.grad.detach() for p in parameters(optimizer) if not p.grad.is_sparse]
        before = [(part, part.clone()) for part in choose(dense)]
        results = original(self, optimizer, *args)
        for part, copy in before:
            part.copy_(copy)
        return results

    return fault


broken("last_element_left_scaled", HOOK, "the last element of a long gradient stays scaled")(
    kept_scaled(lambda grads: [g.view(-1)[-1:] for g in grads if g.numel() > 512 and g.is_contiguous()])
)
broken("second_dtype_left_scaled", HOOK, "only gradients of the first one's dtype are unscaled")(
    kept_scaled(lambda grads: [grad for grad in grads if grad.dtype != grads[0].dtype])
)
broken("not_contiguous_left_scaled", HOOK, "gradients that are not contiguous stay scaled")(
    kept_scaled(lambda grads: [grad for grad in grads if not grad.is_contiguous()])
)
broken("zero_dim_left_scaled", HOOK, "gradients without dimensions stay scaled")(
    kept_scaled(lambda grads: [grad for grad in grads if grad.dim() == 0])
)
broken("largest_is_infinite", HOOK, "the largest finite number is taken for an overflow")(
    finite_by(lambda grad: (grad.abs() < torch.finfo(grad.dtype).max).all())
)


@broken("sparse_not_looked_at", HOOK, "sparse gradients are not looked at", "pytorch/pytorch#36786")
@judged
def sparse_not_looked_at(everything: list[Any]) -> bool:
    return nonfinite(p for p in everything if not p.grad.is_sparse)


@broken("stale_reciprocal", HOOK, "the reciprocal of the first scale is used for all later ones")
def stale_reciprocal(original: Any, self: Any, optimizer: Any, inv_scale: Any, *args: Any) -> Any:
    first = vars(self).setdefault("_reciprocal", {}).setdefault(id(self._scale), inv_scale.clone())
    used = inv_scale if float(inv_scale) == 1.0 else first
    return original(self, optimizer, used, *args)
