"""The fused step of parameters and gradients whose memory layout changed since the last step.

The function `reported` of a test runs with torch's four calls (`by_four`) and with `fused_step` (`by_one`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.fused_steps import (
    KINDS,
    TORCH_HAS_NO_FUSED_STEP,
    FusedStep,
    Take,
    by_four,
    by_one,
)
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import Harness


def negated(grad: Tensor) -> Tensor:
    """Return a tensor equal to `grad`, whose memory holds the negated values."""
    return torch._neg_view(grad.neg())


@contextmanager
def at_once(_: Optimizer, change: Callable[[], None]) -> Generator[None]:
    change()
    yield


@contextmanager
def by_a_hook(optimizer: Optimizer, change: Callable[[], None]) -> Generator[None]:
    with optimizer.register_step_pre_hook(lambda *_: change()):
        yield


@contextmanager
def by_a_wrapper(optimizer: Optimizer, change: Callable[[], None]) -> Generator[None]:
    plain = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        change()
        return plain(*args, **kwargs)

    with mock.patch.object(optimizer, "step", step):
        yield


def params_after(
    harness: Harness, take: Take, change: Callable[[], None], *, step: int = 2, by: Any = at_once
) -> list[Tensor]:
    """Take four steps, the one with the index `step` after a change. Return the parameters after each."""
    log: list[Tensor] = []
    for iteration in range(4):
        harness.zero_grad()
        harness.backward()
        with by(harness.optimizer, change) if iteration == step else nullcontext():
            take(harness, 1.0)
        log += [param.detach().clone() for param in harness.parameters]
    return log


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
def test_shortened_parameter_updates_only_its_elements(fused: FusedStep, device: str) -> None:
    """Shorten the parameter through `.data`, at the same address. Elements that it no longer holds stay unchanged."""

    def reported(library: Library, take: Take) -> list[Any]:
        gradients = (Gradient((9,), seed=1), Gradient((4,), seed=2))
        harness = Harness(library, device, gradients, KINDS["sgd"], init_scale=8.0)
        param = harness.parameters[0]
        whole = param.data

        def shorten() -> None:
            param.grad = None
            param.data = whole[:3]
            param.grad = torch.full((3,), 8.0, device=device)

        return [*params_after(harness, take, shorten, step=3), whole.clone()]

    fused.judge_reported(reported)


BEFORE_THE_STEP = {"the backward": at_once, "a hook": by_a_hook, "what wraps the step": by_a_wrapper}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda grad: grad.t().contiguous().t(),
    "with gaps": lambda grad: torch.stack([grad, grad], -1)[..., 0],
    "negated": negated,
    "elsewhere": Tensor.clone,
}


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("by", BEFORE_THE_STEP)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_with_changed_layout_match_torch(
    fused: FusedStep, device: str, layout: str, by: str
) -> None:
    """Change the layout of gradients in the third step, after two equal steps.

    With a wrapped `step`, the gradients were already checked when it is called. On torch's side, the gradients are only
    moved, because its unscale_ does not support negated ones.
    """

    def reported(library: Library, take: Take) -> list[Any]:
        laid_out = LAYOUTS[layout if take is by_one else "elsewhere"]
        harness = Harness(
            library,
            device,
            (Gradient((9, 4), seed=1), Gradient((4,), seed=2), Gradient((3, 5), seed=3)),
            lambda groups: AdamW(groups, lr=0.125),  # not fused: torch's fused operators use memory order
            init_scale=8.0,
        )

        def change_layout() -> None:
            for param in harness.parameters[::2]:
                assert param.grad is not None
                param.grad.data = laid_out(param.grad.data)

        return params_after(harness, take, change_layout, by=BEFORE_THE_STEP[by])

    fused.judge_reported(reported)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("by", BEFORE_THE_STEP)
@pytest.mark.parametrize("moved_tensor", ["parameter", "exp_avg", "step"])
def test_moved_tensors_are_updated_at_new_address(
    fused: FusedStep, device: str, moved_tensor: str, by: str
) -> None:
    """Move a written tensor through `.data` in the third step. Its old memory stays unchanged."""

    def reported(library: Library, take: Take) -> list[Any]:
        gradients = (Gradient((9, 4), seed=1), Gradient((4,), seed=2))
        harness = Harness(library, device, gradients, lambda groups: AdamW(groups, lr=0.125), init_scale=8.0)
        moved: list[tuple[Tensor, Tensor]] = []

        def move() -> None:
            for param in harness.parameters:
                tensor = (
                    param if moved_tensor == "parameter" else harness.optimizer.state[param][moved_tensor]
                )
                moved.append((tensor.data, tensor.data.clone()))
                tensor.data = tensor.data.clone()

        log = params_after(harness, take, move, by=BEFORE_THE_STEP[by])
        assert moved
        return [*log, *(torch.equal(old, copy) for old, copy in moved)]

    fused.judge_reported(reported)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
def test_parameter_with_changed_layout_is_updated(fused: FusedStep, device: str) -> None:
    """Change the parameter's layout through `.data`, while gradients and states keep theirs."""

    def reported(library: Library, take: Take) -> list[Any]:
        harness = Harness(library, device, (Gradient((4, 4), seed=1),), KINDS["sgd"], init_scale=8.0)
        [param] = harness.parameters
        log: list[Any] = []
        for iteration in range(4):
            harness.scaler.scale(torch.zeros((), device=device))
            if iteration == 0:
                param.grad = torch.empty_like(param)
            if iteration == 2:
                param.data = param.data.t().contiguous().t()
            assert param.grad is not None
            param.grad.copy_(torch.arange(16.0, device=device).view(4, 4))
            # Match the layouts for torch, whose fused operators read elements in memory order.
            if take is by_four:
                param.grad.data = torch.empty_like(param).copy_(param.grad)
            take(harness, math.inf)
            log.append(param.detach().clone())
        return log

    fused.judge_reported(reported)


STATES: dict[str, Callable[[Tensor], Tensor]] = {
    "laid out otherwise": lambda state: state.t().contiguous().t(),
    "in double": Tensor.double,
    "cut off": lambda state: state[:2].clone(),
    "transposed where it lies": Tensor.t,
    "cut off where it lies": lambda state: state[:2],
    "a view that negates": lambda state: torch._neg_view(state.neg()),
}
# Without fused updates, because torch's fused updates read a state in the layout of its parameter.
STATEFUL: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda groups: AdamW(groups, lr=0.125, foreach=True),
    "momentum": lambda groups: SGD(groups, lr=0.125, momentum=0.5, foreach=True),
    "adagrad": lambda groups: Adagrad(groups, lr=0.125, foreach=True),
}


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("form", STATES)
def test_state_with_changed_layout_matches_torch(fused: FusedStep, device: str, form: str, kind: str) -> None:
    """Change a state's layout through `.data` in the third step, so that the tensor object stays the same.

    If torch's step raises, the fused step raises too.
    """

    def reported(library: Library, take: Take) -> list[Outcome]:
        gradients = (Gradient((4, 4), seed=1), Gradient((3,), seed=2))
        harness = Harness(library, device, gradients, STATEFUL[kind], init_scale=8.0)
        outcomes: list[Outcome] = []
        for iteration in range(4):
            harness.zero_grad()
            harness.backward()
            if iteration == 2:
                for state in harness.optimizer.state[harness.parameters[0]].values():
                    if state.dim():
                        state.data = STATES[form](state.data)
            outcome = observe(take, harness, 1.0)
            if outcome.raised is not None:
                return [*outcomes, outcome]
            outcomes.append(observe(lambda: [param.detach().clone() for param in harness.parameters]))
        return outcomes

    fused.judge_states(reported)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
def test_swap_for_sparse_parameter_keeps_others_updated(fused: FusedStep, device: str) -> None:
    """Swap a parameter in the fourth step. The new parameter is sparse, without an address, and has no gradient."""

    def reported(library: Library, take: Take) -> list[Any]:
        gradients = (Gradient((8,), seed=1), Gradient((4,), seed=2))
        harness = Harness(library, device, gradients, KINDS["sgd"], init_scale=8.0)
        swapped = harness.parameters[1]

        def swap() -> None:
            swapped.grad = None
            torch.utils.swap_tensors(swapped, Parameter(torch.ones(4, device=device).to_sparse()))

        return params_after(harness, take, swap, step=3)

    fused.judge_reported(reported)


@clause("amp.grad_scaler.fused_step.does_what_the_four_do")
@TORCH_HAS_NO_FUSED_STEP
def test_step_counter_shared_by_groups_counts_both(fused: FusedStep, device: str) -> None:
    """The shared counter counts the steps of both groups."""

    def reported(library: Library, take: Take) -> list[Any]:
        gradients = tuple(Gradient((size,), seed=size) for size in (3, 4, 5, 6))
        harness = Harness(
            library,
            device,
            gradients,
            lambda params: AdamW(in_two(params), lr=0.125, foreach=True),
            init_scale=8.0,
        )
        log: list[Any] = []
        for iteration in range(5):
            harness.zero_grad()
            harness.backward()
            take(harness, 1.0)
            states = [harness.optimizer.state[param] for param in harness.parameters]
            if iteration == 0:
                states[2]["step"] = states[0]["step"]
            # torch keeps the counter on the host unless the optimizer is fused.
            log += [float(state["step"]) for state in states]
            log += [param.detach().clone() for param in harness.parameters]
        return log

    fused.judge_reported(reported)


def in_two(params_or_groups: Any) -> list[dict[str, Any]]:
    params = [
        param
        for group in params_or_groups
        for param in (group["params"] if isinstance(group, dict) else [group])
    ]
    return [{"params": params[:2]}, {"params": params[2:]}]
