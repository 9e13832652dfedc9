"""`explain`: which parameters a fused step updates from scaled gradients, which it leaves to the optimizer, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, RMSprop

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.strategies.scaling import Recording

SCALE = 8.0
NAMES = ["first", "second", "third"]


class ExplainedStep:
    """A scaler, an optimizer of three parameters, and gradients of 1 times the scale."""

    def __init__(self, library: Library, device: str, optimizer: Callable[[Any], Any]) -> None:
        self.params = [torch.nn.Parameter(torch.ones(2, 3, device=device)) for _ in NAMES]
        self.optimizer = optimizer([*zip(NAMES, self.params, strict=True)])
        self.scaler = library.amp.GradScaler(device, init_scale=SCALE, growth_interval=100)
        self.scaler.scale(torch.ones((), device=device))
        for param in self.params:
            param.grad = torch.full_like(param, SCALE)

    def explanation(self) -> tuple[list[tuple[str, bool]], dict[str, str]]:
        """Return whether `explain` says for each parameter that the optimizer updated it, and the reasons."""
        parameters = self.scaler.explain(self.optimizer).parameters
        return (
            [(name, backend == "optimizer") for name, backend, _ in parameters],
            {name: reason for name, _, reason in parameters},
        )

    def was_left_to_optimizer(self) -> list[tuple[str, bool]]:
        """Return for each parameter whether its gradient was unscaled in place, as for `optimizer.step()`."""
        return [
            (name, param.grad is not None and bool((param.grad == 1.0).all()))
            for name, param in zip(NAMES, self.params, strict=True)
        ]


def _adamw(params: Any) -> Any:
    return AdamW(params, lr=0.125)


def _with_hook(params: Any) -> Any:
    optimizer = _adamw(params)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def _with_other_step(params: Any) -> Any:
    optimizer = _adamw(params)
    own_step = optimizer.step

    def step() -> None:
        own_step()

    optimizer.step = step
    return optimizer


@clause("amp.grad_scaler.fused_step.explained")
@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (_adamw, None),
        (lambda params: SGD(params, lr=0.125, momentum=0.5, foreach=False), None),
        (lambda params: RMSprop(params, lr=0.125), "RMSprop"),
        (Recording, "Recording"),
        (_with_hook, "hook"),
        (_with_other_step, "step"),
    ],
    ids=["adamw", "momentum", "rmsprop", "subclass", "hook", "replaced step"],
)
def test_explanation_agrees_with_gradients(
    subject: Library, device: str, optimizer: Callable[[Any], Any], reason: str | None
) -> None:
    """A fused update leaves the gradients scaled. The optimizer's own step gets unscaled ones."""
    step = ExplainedStep(subject, device, optimizer)
    step.scaler.fused_step(step.optimizer)
    explained, reasons = step.explanation()
    assert explained == step.was_left_to_optimizer() == [(name, reason is not None) for name in NAMES]
    assert reason is None or all(reason in text for text in reasons.values()), reasons
    assert step.scaler.explain(step.optimizer).is_fused is (reason is None)


@clause("amp.grad_scaler.fused_step.explained")
@pytest.mark.parametrize("objection", ["gaps", "layout", "dtype"])
def test_explanation_names_parameter_without_fused_update(
    subject: Library, device: str, objection: str
) -> None:
    """The optimizer updates all parameters because of one, whose reason differs from theirs."""
    if objection == "gaps":
        step = ExplainedStep(subject, device, lambda params: SGD(params, lr=0.125))
        step.params[1].data = torch.ones(2, 6, device=device)[:, ::2]
    else:
        step = ExplainedStep(
            subject, device, lambda params: SGD(params, lr=0.125, momentum=0.5, foreach=False)
        )
        step.scaler.fused_step(step.optimizer)
        for param in step.params:
            param.grad = torch.full_like(param, SCALE)
        state = step.optimizer.state[step.params[1]]
        momentum = state["momentum_buffer"]
        state["momentum_buffer"] = (
            momentum.t().contiguous().t() if objection == "layout" else momentum.bfloat16()
        )
    step.scaler.fused_step(step.optimizer)
    explained, reasons = step.explanation()
    assert explained == step.was_left_to_optimizer() == [(name, True) for name in NAMES]
    assert objection in reasons["second"], reasons
    assert reasons["first"] == reasons["third"] != reasons["second"]
    assert reasons["second"] in reasons["first"], reasons


@clause("amp.grad_scaler.fused_step.explained")
def test_explanation_of_parameter_without_gradient(subject: Library, device: str) -> None:
    step = ExplainedStep(subject, device, _adamw)
    step.params[0].grad = None
    step.scaler.fused_step(step.optimizer)
    first, *others = step.scaler.explain(step.optimizer).parameters
    assert (first[0], first[1]) == ("first", "none")
    assert "gradient" in first[2]
    assert {backend for _, backend, _ in others}.isdisjoint({"none", "optimizer"})


@clause("amp.grad_scaler.fused_step.explained")
@pytest.mark.parametrize("enabled", [True, False])
def test_explanation_is_that_of_last_taken_step(subject: Library, device: str, enabled: bool) -> None:
    """`explain` raises before the first fused step. A skipped step does not replace the explanation."""
    step = ExplainedStep(subject, device, _adamw)
    step.scaler = subject.amp.GradScaler(device, enabled=enabled)
    step.scaler.scale(torch.ones((), device=device))
    with pytest.raises(RuntimeError, match="fused_step"):
        step.scaler.explain(step.optimizer)
    step.scaler.fused_step(step.optimizer)
    before = step.scaler.explain(step.optimizer)
    if enabled:
        step.params[0].grad.fill_(math.inf)
        step.scaler.fused_step(step.optimizer)
    assert step.scaler.explain(step.optimizer).parameters == before.parameters
    with pytest.raises(TypeError, match="param_groups"):
        step.scaler.explain(torch.nn.Linear(1, 1))
