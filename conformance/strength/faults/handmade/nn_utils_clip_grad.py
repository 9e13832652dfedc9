"""Helpers of the faults in torch.nn.utils.clip_grad: the gradients of a call, and typical faults."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from conformance.strength.faults.fault import OWN, Decorator, Make, Substitute, fault_in, in_function

NORM = "nn.utils.clip_grad_norm_"
WITH_NORM = "nn.utils.clip_grads_with_norm_"


def broken(breaks: str, thread: str = OWN, *, on_ranks: bool = False) -> Decorator:
    """Return a decorator of `fault(original, parameters, ...)`, which replaces the function `breaks`."""
    return fault_in("clip_grad", breaks, with_lists, thread, on_ranks=on_ranks)


def with_lists(fault: Substitute) -> Make:
    """Return a maker that replaces a function by `fault`, which gets the parameters as a list, for several passes."""

    def listing(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        # The original gets empty iterables unchanged, because it may warn of them.
        if isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor):
            parameters = list(parameters) or parameters
        return fault(original, parameters, *args, **kwargs)

    return in_function(listing)


def gradients(parameters: Any) -> list[torch.Tensor]:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return [p.grad for p in parameters if p.grad is not None]


def is_number(value: Any) -> bool:
    """Return whether a fault may compute with a value. Others are passed to the original, which refuses them."""
    return isinstance(value, (int, float))


def plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor


def coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def after(change: Callable[[torch.Tensor, Any, Any], Any]) -> Substitute:
    """Return `change(norm, parameters, max_norm)` instead of the norm."""

    @functools.wraps(change)
    def fault(original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        return change(original(parameters, max_norm, *args, **kwargs), parameters, max_norm)

    return fault


def scaled_by(factor: Callable[[torch.Tensor, float], torch.Tensor]) -> Substitute:
    """Scale the gradients by `factor(norm, max_norm)`. The original only computes the norm."""

    @functools.wraps(factor)
    def fault(original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not is_number(max_norm):
            return original(parameters, max_norm, *args, **kwargs)
        norm = original(parameters, torch.inf, *args, **kwargs)
        for grad in gradients(parameters):
            grad.detach().mul_(factor(norm, float(max_norm)).to(grad.device))
        return norm

    return fault


def with_foreach(expected: bool) -> Callable[[Substitute], Substitute]:
    """Return a decorator that calls a fault only if `foreach` is `expected`."""

    def restrict(restricted: Substitute) -> Substitute:
        @functools.wraps(restricted)
        def fault(
            original: Any,
            parameters: Any,
            max_norm: Any,
            norm_type: Any = 2.0,
            error_if_nonfinite: Any = False,
            foreach: Any = None,
        ) -> Any:
            arguments = (parameters, max_norm, norm_type, error_if_nonfinite, foreach)
            return restricted(original, *arguments) if foreach is expected else original(*arguments)

        return fault

    return restrict


def left_out(choose: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Substitute:
    """Restore the gradients that `choose` returns, or views of them, after the call."""

    @functools.wraps(choose)
    def fault(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        chosen = [(part, part.clone()) for part in choose([grad.detach() for grad in gradients(parameters)])]
        norm = original(parameters, *args, **kwargs)
        for part, before in chosen:
            part.copy_(before)
        return norm

    return fault
