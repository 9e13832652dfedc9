"""Faults in tracing of an optimizer by Dynamo: bugs of torch's history, and similar ones.

Dynamo's names are looked up when they are used, because every rank reads this file and few ranks need Dynamo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from conformance.strength.faults.fault import OWN, Decorator, Make, Substitute, fault_in, in_method

OPTIMIZER = "dynamo.OptimizerVariable"
_kept_alive: list[Any] = []


def broken(thread: str) -> Decorator:
    """Return a decorator of `fault(original, variable, tx, args, kwargs)`, which replaces a call of `_init_group`."""
    return fault_in("optimizer_variable", OPTIMIZER, _in_init_group, thread)


def _in_init_group(fault: Substitute) -> Make:
    def call_method(original: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "_init_group":
            return original(self, tx, name, args, kwargs)
        return fault(original, self, tx, args, kwargs)

    return in_method("call_method", call_method)


def afterwards(change: Callable[[Any, Any], None]) -> Substitute:
    """Call `change(variable, tx)` after `_init_group`."""

    @functools.wraps(change)
    def fault(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = original(self, tx, "_init_group", args, kwargs)
        change(self, tx)
        return result

    return fault


def without_guards(is_lost: Callable[[Any, str], bool]) -> Substitute:
    """Remove the guards for which `is_lost(guard, name of its source)`."""

    @functools.wraps(is_lost)
    def change(self: Any, tx: Any) -> None:
        guards = tx.output.guards
        for guard in [guard for guard in guards if is_lost(guard, guard.originating_source.name)]:
            guards.inner.discard(guard)

    return afterwards(change)


def step_counts(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {key: entry["step"] for key, entry in optimizer.state.items() if "step" in entry}


@broken("pytorch/pytorch#110709")
def returns_nothing(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """The result of _init_group is dropped."""
    original(self, tx, "_init_group", args, kwargs)
    return torch._dynamo.variables.ConstantVariable.create(None)


@broken("pytorch/pytorch#117147")
def lists_lose_state(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Existing state is collected as missing."""
    result = original(self, tx, "_init_group", args, kwargs)
    if isinstance(self.value, torch.optim.SGD):
        args[3].items[:] = [torch._dynamo.variables.ConstantVariable.create(None) for _ in args[3].items]
    return result


@broken("pytorch/pytorch#131398")
def ignores_closures(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Pending changes are not waited for."""
    effects = tx.output.side_effects
    with (
        mock.patch.object(effects, "has_pending_mutation", return_value=False),
        mock.patch.object(effects, "is_modified", return_value=False),
    ):
        return original(self, tx, "_init_group", args, kwargs)


@broken("pytorch/pytorch#117150")
def scalars_stay(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Step counts stay on the CPU."""
    before = step_counts(self.value)
    result = original(self, tx, "_init_group", args, kwargs)
    for key, step in before.items():
        self.value.state[key]["step"] = step
    return result


@broken("pytorch/pytorch#100264")
def never_frees(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Compiled code keeps its optimizer alive."""
    _kept_alive.append(self.value)
    return original(self, tx, "_init_group", args, kwargs)


# Guards


@broken("pytorch/pytorch#123285")
@without_guards
def no_gradient_guard(guard: Any, name: str) -> bool:
    """A gradient that exists again is not noticed."""
    return name.endswith(".grad")


@broken("pytorch/pytorch#123413")
@without_guards
def gradient_guard_of_the_first(guard: Any, name: str) -> bool:
    """Only the gradient of the first parameter is guarded."""
    return name.endswith(".grad") and "['params'][0]" not in name


@broken("pytorch/pytorch#122647")
@without_guards
def first_group_guarded(guard: Any, name: str) -> bool:
    """Only the first group is guarded."""
    return "param_groups[1]" in name


@broken("pytorch/pytorch#133898")
@without_guards
def betas_unguarded(guard: Any, name: str) -> bool:
    """The betas are constants of the compiled code."""
    return "betas" in name


@broken("pytorch/pytorch#129362")
@without_guards
def state_unguarded(guard: Any, name: str) -> bool:
    """Another state than the compiled one is not noticed."""
    return ".state" in name


@broken("pytorch/pytorch#122647")
@without_guards
def kinds_unguarded(guard: Any, name: str) -> bool:
    """Tensors of another kind are not noticed."""
    return guard.create_fn_name() == "TENSOR_MATCH"


@broken("pytorch/pytorch#130467")
@afterwards
def rates_guarded(variable: Any, tx: Any) -> None:
    """Each learning rate is compiled separately."""
    guards, source = torch._dynamo.guards, torch._dynamo.source
    for index in range(len(variable.value.param_groups)):
        group = source.GetItemSource(source.AttrSource(variable.source, "param_groups"), index)
        rate = source.DictGetItemSource(group, "lr")
        guards.install_guard(rate.make_guard(guards.GuardBuilder.EQUALS_MATCH))


# Options, states and gradients after the trace


@broken("pytorch/pytorch#182706")
@afterwards
def capturable_written(variable: Any, tx: Any) -> None:
    """The groups are capturable afterwards."""
    for group in variable.value.param_groups:
        if "capturable" in group:
            group["capturable"] = True


@broken("pytorch/pytorch#76368")
@afterwards
def steps_detached(variable: Any, tx: Any) -> None:
    """Step counts of the state do not change."""
    for key, step in step_counts(variable.value).items():
        variable.value.state[key]["step"] = step.clone() if isinstance(step, torch.Tensor) else step


@broken("pytorch/pytorch#107853")
@afterwards
def gradients_static(variable: Any, tx: Any) -> None:
    """Gradients are marked as having a fixed address."""
    for parameter in (parameter for group in variable.value.param_groups for parameter in group["params"]):
        if parameter.grad is not None:
            torch._dynamo.mark_static_address(parameter.grad, guard=False)


# Attributes of the optimizer


def in_resolution(thread: str = OWN) -> Decorator:
    """Return a decorator of `fault(original, variable, tx, name)`, which replaces the resolution of an attribute."""
    return fault_in("optimizer_variable", OPTIMIZER, _in_resolution, thread)


def _in_resolution(fault: Substitute) -> Make:
    def make(original: type) -> type:  # late, since the name of the method needs Dynamo
        base = torch._dynamo.variables.UserDefinedObjectVariable
        # torch 2.14 renamed the method.
        method = "tp_getattro_impl" if hasattr(base, "tp_getattro_impl") else "var_getattr"
        return in_method(method, fault)(original)

    return make


@in_resolution("pytorch/pytorch#94392")
def demands_init_group(original: Any, self: Any, tx: Any, name: str) -> Any:
    """An optimizer without _init_group is refused."""
    if name == "param_groups" and not hasattr(self.value, "_init_group"):
        raise AttributeError(f"{type(self.value).__name__} has no _init_group")
    return original(self, tx, name)


@in_resolution("pytorch/pytorch#94392")
def demands_init_group_of_all(original: Any, self: Any, tx: Any, name: str) -> Any:
    """An optimizer without _init_group is refused, even if Dynamo does not trace it."""
    if name == "step" and not hasattr(self.value, "_init_group"):
        raise RuntimeError(f"{type(self.value).__name__} has no _init_group")
    return original(self, tx, name)


def in_trace(option: str) -> Callable[[Callable[[Any], Any]], Substitute]:
    """Return a decorator of `change(value)`, which returns the value of a group's option that the trace reads."""

    def adapt(change: Callable[[Any], Any]) -> Substitute:
        @functools.wraps(change)
        def fault(original: Any, self: Any, tx: Any, name: str) -> Any:
            result = original(self, tx, name)
            if name == "param_groups":
                for group in torch._dynamo.variables.LazyVariableTracker.realize_all(result).items:
                    for key, tracker in list(group.items.items()):
                        if key.vt.as_python_constant() == option:
                            value = change(tracker.as_python_constant())
                            group.items[key] = torch._dynamo.variables.ConstantVariable.create(value)
            return result

        return fault

    return adapt


@in_resolution("pytorch/pytorch#88173")
@in_trace("capturable")
def reads_step_counts(value: bool) -> bool:
    """The step is traced as not capturable, and reads its counts on the host."""
    return False


@in_resolution()
@in_trace("weight_decay")
def decay_lost(value: float) -> float:
    """No optimizer has weight decay."""
    return 0.0
