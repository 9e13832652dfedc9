"""Faults of how Dynamo traces an optimizer: real ones of torch's history, and their neighbours.

Dynamo's names are looked up where they are used: every rank reads this file, and few need Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from conformance.strength.faults.fault import Make, Substitute, in_method, register_fault

OPTIMIZER = "dynamo.OptimizerVariable"
_kept: list[Any] = []


def broken(fault_id: str, says: str, thread: str = "own") -> Callable[[Substitute], Substitute]:
    """Enter a fault of what becomes of a call of `_init_group`."""

    def enter(fault: Substitute) -> Substitute:
        def of_the_call(original: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name != "_init_group":
                return original(self, tx, name, args, kwargs)
            return fault(original, self, tx, args, kwargs)

        register_fault(f"optimizer_variable.{fault_id}", OPTIMIZER, says=says, thread=thread)(
            in_method("call_method", of_the_call)
        )
        return fault

    return enter


def afterwards(change: Callable[[Any, Any, Any], None]) -> Substitute:
    """The call, and then `change(self, tx, args)`."""

    def fault(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = original(self, tx, "_init_group", args, kwargs)
        change(self, tx, args)
        return result

    return fault


def without_guards(is_lost: Callable[[Any, str], bool]) -> Substitute:
    """The guards for which `is_lost(guard, name of its source)` are taken off again."""

    def change(self: Any, tx: Any, args: Any) -> None:
        guards = tx.output.guards
        for guard in [
            lost_guard for lost_guard in guards if is_lost(lost_guard, lost_guard.originating_source.name)
        ]:
            guards.inner.discard(guard)

    return afterwards(change)


def kind_of(guard: Any) -> str:
    return guard.create_fn_name()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step_counts(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {key: entry["step"] for key, entry in optimizer.state.items() if "step" in entry}


@broken("returns_nothing", "what _init_group returns is dropped", "pytorch/pytorch#110709")
def returns_nothing(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    original(self, tx, "_init_group", args, kwargs)
    return torch._dynamo.variables.ConstantVariable.create(None)


@broken("lists_lose_state", "state that is there already is collected as missing", "pytorch/pytorch#117147")
def lists_lose_state(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    result = original(self, tx, "_init_group", args, kwargs)
    if isinstance(self.value, torch.optim.SGD):
        args[3].items[:] = [torch._dynamo.variables.ConstantVariable.create(None) for _ in args[3].items]
    return result


@broken("ignores_closures", "changes that are pending are not waited for", "pytorch/pytorch#131398")
def ignores_closures(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    effects = tx.output.side_effects
    with (
        mock.patch.object(effects, "has_pending_mutation", return_value=False),
        mock.patch.object(effects, "is_modified", return_value=False),
    ):
        return original(self, tx, "_init_group", args, kwargs)


@broken("scalars_stay", "step counts on the CPU stay there", "pytorch/pytorch#117150")
def scalars_stay(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    before = step_counts(self.value)
    result = original(self, tx, "_init_group", args, kwargs)
    for key, step in before.items():
        self.value.state[key]["step"] = step
    return result


@broken("never_frees", "what was compiled keeps its optimizer", "pytorch/pytorch#100264")
def never_frees(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    _kept.append(self.value)
    return original(self, tx, "_init_group", args, kwargs)


broken("no_gradient_guard", "a gradient that comes back is not seen", "pytorch/pytorch#123285")(
    without_guards(lambda guard, name: name.endswith(".grad"))
)
broken(
    "gradient_guard_of_the_first", "only the first parameter's gradient is guarded", "pytorch/pytorch#123413"
)(without_guards(lambda guard, name: name.endswith(".grad") and "['params'][0]" not in name))
broken("first_group_guarded", "only the first group is guarded", "pytorch/pytorch#122647")(
    without_guards(lambda guard, name: "param_groups[1]" in name)
)
broken("betas_unguarded", "betas are fixed in the code", "pytorch/pytorch#133898")(
    without_guards(lambda guard, name: "betas" in name)
)
broken("state_unguarded", "other state than was compiled for is not seen", "pytorch/pytorch#129362")(
    without_guards(lambda guard, name: ".state" in name)
)
broken("kinds_unguarded", "tensors of another kind are not seen", "pytorch/pytorch#122647")(
    without_guards(lambda guard, name: kind_of(guard) == "TENSOR_MATCH")
)


def _guard_rates(self: Any, tx: Any, args: Any) -> None:
    guards, source = torch._dynamo.guards, torch._dynamo.source
    for index in range(len(self.value.param_groups)):
        group = source.GetItemSource(source.AttrSource(self.source, "param_groups"), index)
        rate = source.DictGetItemSource(group, "lr")
        guards.install_guard(rate.make_guard(guards.GuardBuilder.EQUALS_MATCH))


def _write_capturable(self: Any, tx: Any, args: Any) -> None:
    for group in self.value.param_groups:
        if "capturable" in group:
            group["capturable"] = True


def _detach_steps(self: Any, tx: Any, args: Any) -> None:
    for key, step in step_counts(self.value).items():
        self.value.state[key]["step"] = step.clone() if isinstance(step, torch.Tensor) else step


def _mark_gradients(self: Any, tx: Any, args: Any) -> None:
    for parameter in parameters_of(self.value):
        if parameter.grad is not None:
            torch._dynamo.mark_static_address(parameter.grad, guard=False)


broken("rates_guarded", "each learning rate is compiled for", "pytorch/pytorch#130467")(
    afterwards(_guard_rates)
)
broken("capturable_written", "the groups say capturable afterwards", "pytorch/pytorch#182706")(
    afterwards(_write_capturable)
)
broken("steps_detached", "step counts of the state stand still", "pytorch/pytorch#76368")(
    afterwards(_detach_steps)
)
broken("gradients_static", "gradients are marked as of a fixed address", "pytorch/pytorch#107853")(
    afterwards(_mark_gradients)
)


def _resolve() -> str:
    """Return the name of the method by which Dynamo resolves an attribute. torch 2.14 renamed it."""
    base = torch._dynamo.variables.UserDefinedObjectVariable
    return "tp_getattro_impl" if hasattr(base, "tp_getattro_impl") else "var_getattr"


def in_resolution(fault: Substitute) -> Make:
    """Return the class with `fault` instead of the method that resolves an attribute."""

    def make(original: type) -> type:  # late, since the name of the method needs Dynamo
        return in_method(_resolve(), fault)(original)

    return make


def _demand_init_group(original: Any, self: Any, tx: Any, name: str) -> Any:
    if name == "param_groups" and not hasattr(self.value, "_init_group"):
        raise AttributeError(f"{type(self.value).__name__} has no _init_group")
    return original(self, tx, name)


def _demand_it_of_all(original: Any, self: Any, tx: Any, name: str) -> Any:
    if name == "step" and not hasattr(self.value, "_init_group"):
        raise RuntimeError(f"{type(self.value).__name__} has no _init_group")
    return original(self, tx, name)


register_fault(
    "optimizer_variable.demands_init_group",
    OPTIMIZER,
    says="an optimizer without _init_group is refused",
    thread="pytorch/pytorch#94392",
)(in_resolution(_demand_init_group))
register_fault(
    "optimizer_variable.demands_init_group_of_all",
    OPTIMIZER,
    says="an optimizer without _init_group is refused, also one that Dynamo calls as it is",
    thread="pytorch/pytorch#94392",
)(in_resolution(_demand_it_of_all))


def in_the_trace(
    fault_id: str, says: str, option: str, instead: Callable[[Any], Any], thread: str = "own"
) -> None:
    """Register a fault in which the trace reads `instead(value)` for this option of the groups."""

    def fault(original: Any, self: Any, tx: Any, name: str) -> Any:
        result = original(self, tx, name)
        if name == "param_groups":
            for group in torch._dynamo.variables.LazyVariableTracker.realize_all(result).items:
                for key, tracker in list(group.items.items()):
                    if key.vt.as_python_constant() == option:
                        value = instead(tracker.as_python_constant())
                        group.items[key] = torch._dynamo.variables.ConstantVariable.create(value)
        return result

    register_fault(f"optimizer_variable.{fault_id}", OPTIMIZER, says=says, thread=thread)(
        in_resolution(fault)
    )


in_the_trace(
    "reads_step_counts",
    "the step is traced as not capturable, and reads its counts on the host",
    "capturable",
    lambda value: False,
    thread="pytorch/pytorch#88173",
)
in_the_trace("decay_lost", "no optimizer has weight decay", "weight_decay", lambda value: 0.0)
