"""Skipped fused steps of user-defined optimizers, decided by a flag on the device: their state is restored."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.strategies.fused_steps import SOME, TORCH_HAS_NO_FUSED_STEP, FusedStep, Take, by_one
from conformance.strategies.scaling import Harness


class HostKnowsNothing(TorchDispatchMode):
    """Mode in which the host does not know the values of CPU tensors, as on another device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class UserOptimizer(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"moved": 0.0, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.move(group, param, param.grad)

    def move(self, group: dict[str, Any], param: Tensor, grad: Tensor | None) -> None:
        raise NotImplementedError


class ReplacesState(UserOptimizer):
    def move(self, group: dict[str, Any], param: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            state = self.state[param]
            state["mean"] = state.get("mean", torch.zeros_like(param)) * 0.5 + grad
            param.sub_(state["mean"], alpha=0.125)


class AddsState(UserOptimizer):
    """Adds state in its second step."""

    def move(self, group: dict[str, Any], param: Tensor, grad: Tensor | None) -> None:
        state = self.state[param]
        if grad is None:
            return
        if "last" in state:
            param.sub_(state["last"], alpha=0.125)
            state["last"].copy_(grad)
        elif "sum" in state:
            state["last"] = grad.clone()
        else:
            state["sum"] = torch.zeros_like(param)


class KeepsNumbersInGroups(UserOptimizer):
    def move(self, group: dict[str, Any], param: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            group["steps"] += 1
            group["moved"] += float(grad.sum())
            self.state[param].setdefault("sum", torch.zeros_like(param)).add_(grad)
            param.sub_(self.state[param]["sum"], alpha=0.125 / group["steps"])


class KeepsTensorsInGroups(UserOptimizer):
    def move(self, group: dict[str, Any], param: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            self.state[param].setdefault("sum", torch.zeros_like(param)).add_(grad)
            if not isinstance(group["moved"], Tensor):
                group["moved"] = torch.ones((), device=param.device)
            group["moved"] += grad.abs().sum()
            param.sub_(grad * group["moved"], alpha=0.125)


class KeepsAttributes(UserOptimizer):
    momentum: Tensor | None = None
    count = 0

    def move(self, group: dict[str, Any], param: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            self.count += 1
            self.momentum = grad.sum() if self.momentum is None else self.momentum * 0.5 + grad.sum()
            param.sub_(grad + self.momentum, alpha=0.125 / self.count)


class MovesAll(UserOptimizer):
    """Moves all parameters, even without a gradient, by the largest 1-norm of all gradients."""

    def move(self, group: dict[str, Any], param: Tensor, grad: Tensor | None) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        param.sub_(torch.stack([grad.abs().sum() for grad in grads]).amax(), alpha=0.125)


OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    ReplacesState, AddsState, KeepsNumbersInGroups, KeepsTensorsInGroups, KeepsAttributes, MovesAll,
]  # fmt: skip


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("require_grad", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_skipped_step_restores_optimizer_state(
    fused: FusedStep, device: str, make: Callable[[Any], Optimizer], require_grad: bool
) -> None:
    """The state is restored, even for parameters that do not require gradients, like masters."""

    def reported(library: Library, take: Take) -> list[Any]:
        harness = Harness(library, device, SOME, make, init_scale=8.0)
        log: list[Any] = []
        for last in (None, math.inf, None, math.nan, math.inf, None):
            harness.zero_grad()
            harness.backward(last)
            for param in harness.parameters:
                param.requires_grad_(require_grad or param.grad is None)
            with HostKnowsNothing() if take is by_one else contextlib.nullcontext():
                take(harness, math.inf)
            for param in harness.parameters:
                param.requires_grad_(True)
            states = [harness.optimizer.state.get(param, {}) for param in harness.parameters]
            groups = [{**group, "params": len(group["params"])} for group in harness.optimizer.param_groups]
            own = {key: vars(harness.optimizer).get(key) for key in ("momentum", "count")}
            log += [
                [param.detach().clone() for param in harness.parameters],
                copied(states),
                copied(groups),
                copied(own),
            ]
        return log

    fused.judge_reported(reported)


def copied(state: Any) -> Any:
    """Copy the state, with names instead of tensors' identities."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {str(key): copied(value) for key, value in state.items()}
    return [copied(item) for item in state] if isinstance(state, list) else state
