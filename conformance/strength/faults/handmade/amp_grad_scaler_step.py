"""Faults in torch.amp.GradScaler: the step, what is attached to optimizers that unscale by themselves, stages."""

from __future__ import annotations

import contextlib
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


@broken(
    "steps_on_overflow",
    "_maybe_opt_step",
    "the optimizer is called on zeroed gradients instead of skipped",
    "pytorch/pytorch#44511",
)
def steps_on_overflow(original: Any, self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    if not sum(float(flag) for flag in state["found_inf_per_device"].values()):
        return original(self, optimizer, state, *args, **kwargs)
    for parameter in parameters(optimizer):
        parameter.grad.zero_()
    optimizer.step(*args, **kwargs)
    return None


@broken("return_value_lost", "step", "what the optimizer's step returns is lost", "pytorch/pytorch#67590")
def return_value_lost(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    original(self, optimizer, *args, **kwargs)


@broken("rechecked_in_step", "step", "step looks again although unscale_ has", "pytorch/pytorch#97415")
def rechecked_in_step(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if self.is_enabled():
        results, bad = check_results(self, optimizer), nonfinite(parameters(optimizer))
        for check_result in results:
            check_result.fill_(float(bad))
    return original(self, optimizer, *args, **kwargs)


@broken(
    "spoilt_after_unscaling",
    "step",
    "an inf that comes after unscale_ is caught for some optimizers",
    "pytorch/pytorch#96755",
)
def spoilt_after_unscaling(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
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


def laying(change: Callable[[Any, Any, bool], None]) -> Substitute:
    """`change(scaler, optimizer, unscaled)` alters what an optimizer that unscales by itself finds on itself."""

    def fault(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled() or not unscales_by_itself(optimizer):
            return original(self, optimizer, *args, **kwargs)
        unscaled = self._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED"
        with changing_before_step(optimizer, lambda attached: change(self, attached, unscaled)):
            return original(self, optimizer, *args, **kwargs)

    return fault


@broken(
    "unscaled_twice",
    "step",
    "an optimizer that unscales by itself gets the scale although unscale_ was called",
    "pytorch/pytorch#94060",
)
@laying
def unscaled_twice(scaler: Any, optimizer: Any, unscaled: bool) -> None:
    if unscaled:
        optimizer.grad_scale = scaler._get_scale_async()


@broken(
    "no_check_result_after_unscaling",
    "step",
    "after unscale_ an optimizer that skips by itself gets no found_inf",
    "pytorch/pytorch#95847",
)
@laying
def no_check_result_after_unscaling(scaler: Any, optimizer: Any, unscaled: bool) -> None:
    if unscaled:
        optimizer.found_inf = torch.zeros_like(torch.as_tensor(optimizer.found_inf, dtype=torch.float32))


@broken(
    "aware_gradients_unscaled",
    "_check_inf_per_device",
    "gradients are unscaled before the optimizer that does so by itself",
    "pytorch/pytorch#98772",
)
def aware_gradients_unscaled(original: Any, self: Any, optimizer: Any) -> Any:
    results = original(self, optimizer)
    for parameter in parameters(optimizer):
        parameter.grad.mul_(1.0 / self.get_scale())
    return results


@broken("closures_taken", "step", "a closure by keyword runs", "pytorch/pytorch#142472")
def closures_taken(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("closure", None)
    return original(self, optimizer, *args, **kwargs)


@broken(
    "no_gradients_steps",
    "step",
    "an optimizer that has no gradients is stepped",
    "nerfstudio-project/nerfstudio#1919",
)
def no_gradients_steps(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if self.is_enabled() and hasattr(optimizer, "param_groups") and not parameters(optimizer):
        return optimizer.step(*args, **kwargs)
    return original(self, optimizer, *args, **kwargs)


@broken("step_twice", "step", "a second step without update is taken", "Azure/MS-AMP#45")
def step_twice(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, optimizer, *args, **kwargs)
    forget_stage(self, optimizer)
    return result


@broken("skip_returns_false", "step", "a skipped step returns False", "huggingface/accelerate#2828")
def skip_returns_false(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, optimizer, *args, **kwargs)
    return False if result is None else result


@broken(
    "refused_step_counts",
    "step",
    "a step that is refused for want of gradients counts as taken",
    "Lightning-AI/pytorch-lightning#4524",
)
def refused_step_counts(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(self, optimizer, *args, **kwargs)
    except AssertionError:
        if self.is_enabled() and self._scale is not None:
            state = self._per_optimizer_states[id(optimizer)]
            state["stage"] = type(state["stage"]).STEPPED
        raise


@broken(
    "no_gradients_in_silence",
    "step",
    "an optimizer that has no gradients seems to have been skipped",
    "Lightning-AI/pytorch-lightning#4524",
)
def no_gradients_in_silence(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(self, optimizer, *args, **kwargs)
    except AssertionError as error:
        if "No inf checks" not in str(error):
            raise
        return None
