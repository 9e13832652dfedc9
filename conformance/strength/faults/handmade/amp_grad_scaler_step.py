"""Faults in torch.amp.GradScaler: the step, its stages, and optimizers that unscale by themselves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute
from conformance.strength.faults.handmade.amp_grad_scaler import (
    broken,
    check_results,
    forget_stage,
    nonfinite,
    parameters,
    unscales_by_itself,
)


@broken("_maybe_opt_step", "pytorch/pytorch#44511")
def steps_on_overflow(original: Any, self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """The optimizer is called with zero gradients instead of skipped."""
    if not sum(float(flag) for flag in state["found_inf_per_device"].values()):
        return original(self, optimizer, state, *args, **kwargs)
    for parameter in parameters(optimizer):
        parameter.grad.zero_()
    optimizer.step(*args, **kwargs)
    return None


@broken("step", "pytorch/pytorch#67590")
def return_value_lost(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """The result of the optimizer's step is lost."""
    original(self, optimizer, *args, **kwargs)


@broken("step", "pytorch/pytorch#97415")
def rechecked_in_step(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """`step` checks gradients that `unscale_` has checked."""
    if self.is_enabled():
        results, bad = check_results(self, optimizer), nonfinite(parameters(optimizer))
        for check_result in results:
            check_result.fill_(float(bad))
    return original(self, optimizer, *args, **kwargs)


@broken("step", "pytorch/pytorch#96755")
def late_inf_detected(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """An inf that appears after `unscale_` is detected for some optimizers."""
    if self.is_enabled() and getattr(optimizer, "_step_supports_amp_scaling", False):
        bad = nonfinite(parameters(optimizer))
        for check_result in check_results(self, optimizer):
            check_result.fill_(max(float(check_result), float(bad)))
    return original(self, optimizer, *args, **kwargs)


@contextlib.contextmanager
def changing_before_step(optimizer: Any, change: Callable[[Any], None]) -> Iterator[None]:
    """Context manager in which the optimizer's step calls `change(optimizer)` first."""
    real = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        change(optimizer)
        return real(*args, **kwargs)

    optimizer.step = step
    try:
        yield
    finally:
        del optimizer.step


def attaching(change: Callable[[Any, Any, bool], None]) -> Substitute:
    """Call `change(scaler, optimizer, unscaled)` before the step of an optimizer that unscales by itself."""

    @functools.wraps(change)
    def fault(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled() or not unscales_by_itself(optimizer):
            return original(self, optimizer, *args, **kwargs)
        unscaled = self._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED"
        with changing_before_step(optimizer, lambda attached: change(self, attached, unscaled)):
            return original(self, optimizer, *args, **kwargs)

    return fault


@broken("step", "pytorch/pytorch#94060")
@attaching
def unscaled_twice(scaler: Any, optimizer: Any, unscaled: bool) -> None:
    """An optimizer that unscales by itself gets the scale after `unscale_`."""
    if unscaled:
        optimizer.grad_scale = scaler._get_scale_async()


@broken("step", "pytorch/pytorch#95847")
@attaching
def no_check_result_after_unscaling(scaler: Any, optimizer: Any, unscaled: bool) -> None:
    """An optimizer that skips by itself gets no found_inf after `unscale_`."""
    if unscaled:
        optimizer.found_inf = torch.zeros_like(torch.as_tensor(optimizer.found_inf, dtype=torch.float32))


@broken("_check_inf_per_device", "pytorch/pytorch#98772")
def aware_gradients_unscaled(original: Any, self: Any, optimizer: Any) -> Any:
    """Gradients are unscaled before an optimizer that unscales by itself."""
    results = original(self, optimizer)
    for parameter in parameters(optimizer):
        parameter.grad.mul_(1.0 / self.get_scale())
    return results


@broken("step", "pytorch/pytorch#142472")
def closures_accepted(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """A closure that is passed by keyword runs."""
    kwargs.pop("closure", None)
    return original(self, optimizer, *args, **kwargs)


@broken("step", "nerfstudio-project/nerfstudio#1919")
def no_gradients_steps(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """An optimizer without gradients is stepped."""
    if self.is_enabled() and hasattr(optimizer, "param_groups") and not parameters(optimizer):
        return optimizer.step(*args, **kwargs)
    return original(self, optimizer, *args, **kwargs)


@broken("step", "Azure/MS-AMP#45")
def step_twice(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """A second step without update is accepted."""
    result = original(self, optimizer, *args, **kwargs)
    forget_stage(self, optimizer)
    return result


@broken("step", "huggingface/accelerate#2828")
def skip_returns_false(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """A skipped step returns False."""
    result = original(self, optimizer, *args, **kwargs)
    return False if result is None else result


@broken("step", "Lightning-AI/pytorch-lightning#4524")
def refused_step_counts(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """A step that is refused because there are no gradients counts as done."""
    try:
        return original(self, optimizer, *args, **kwargs)
    except AssertionError:
        if self.is_enabled() and self._scale is not None:
            state = self._per_optimizer_states[id(optimizer)]
            state["stage"] = type(state["stage"]).STEPPED
        raise


@broken("step", "Lightning-AI/pytorch-lightning#4524")
def no_gradients_skip_silently(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """An optimizer without gradients is skipped silently."""
    try:
        return original(self, optimizer, *args, **kwargs)
    except AssertionError as error:
        if "No inf checks" not in str(error):
            raise
        return None
