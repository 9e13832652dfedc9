"""Side effects of a fused step: hooks, schedulers and replaced steps. The host waits for no device value."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.strategies.fused_steps import (
    KINDS,
    SOME,
    TORCH_HAS_NO_FUSED_STEP,
    FusedStep,
    Take,
    by_one,
    state_of,
)
from conformance.strategies.scaling import Harness


@clause("amp.grad_scaler.fused_step.seen_as_a_step")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("comes_to_it", [True, False])
@pytest.mark.parametrize("on", ["the optimizer", "its class"])
def test_replaced_optimizer_step_is_called(fused: FusedStep, device: str, on: str, comes_to_it: bool) -> None:
    """A replaced `step` is called once per step, with unscaled and clipped gradients, as torch's scaler calls it."""

    def reported(library: Library, take: Take) -> list[Any]:
        harness = Harness(library, device, SOME, lambda groups: AdamW(groups, lr=0.125, foreach=True))
        plain, log = AdamW.step, []

        def replaced(self: Optimizer) -> None:
            params = [param for param in harness.parameters if param.grad is not None]
            log.append([param.grad.clone() for param in params if param.grad is not None])
            if comes_to_it:
                for param in params:
                    param.data = param.data.clone()
                plain(self)

        place = AdamW if on == "its class" else harness.optimizer
        with mock.patch.object(
            place, "step", replaced if place is AdamW else lambda: replaced(harness.optimizer)
        ):
            for last in (None, None, math.inf, None):
                harness.zero_grad()
                harness.backward(last)
                take(harness, 0.5)
                log.append([param.detach().clone() for param in harness.parameters])
        return log

    fused.judge_reported(reported)


@clause("amp.grad_scaler.fused_step.seen_as_a_step")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
@pytest.mark.parametrize("last", [None, math.inf])
def test_hooks_and_schedulers_count_taken_steps(
    fused: FusedStep, device: str, kind: str, last: float | None
) -> None:
    """A taken step counts for hooks and schedulers, and a skipped step does not. The scaler reports both."""

    def probe(library: Library) -> Any:
        harness = Harness(library, device, SOME, KINDS[kind])
        called: list[str] = []
        harness.optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        harness.optimizer.register_step_post_hook(lambda *_: called.append("after"))
        scheduler = StepLR(harness.optimizer, 1)
        harness.zero_grad()
        harness.backward(last)
        harness.scaler.fused_step(harness.optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        names = harness.scaler.nonfinite_parameters(harness.optimizer)
        return called, len(caught), harness.scaler.step_was_taken(harness.optimizer), len(names)

    # If the flag is on the device, a fused optimizer is called even for a skipped step, as by torch's scaler.
    skipped = (
        ([], 1, False, 1) if device == "cpu" or kind == "rmsprop" else (["before", "after"], 0, False, 1)
    )

    def compare(outcome: Any) -> None:
        assert outcome == ((["before", "after"], 0, True, 0) if last is None else skipped)

    fused.judge(probe, compare)


@clause("amp.grad_scaler.fused_step.seen_as_a_step")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("everywhere", [False, True], ids=["its own", "of all optimizers"])
def test_hooks_after_the_step_get_its_arguments(fused: FusedStep, device: str, everywhere: bool) -> None:
    def reported(library: Library, take: Take) -> list[Any]:
        harness, log = Harness(library, device, SOME, KINDS["adamw"]), list[Any]()

        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if optimizer is harness.optimizer:
                log.append([args == (optimizer,), kwargs])

        register = (
            register_optimizer_step_post_hook if everywhere else harness.optimizer.register_step_post_hook
        )
        with register(hook):
            for _ in range(2):
                harness.zero_grad()
                harness.backward()
                take(harness, 0.5)
        assert log
        return log

    fused.judge_reported(reported)


class NoHostRead(TorchDispatchMode):
    """Mode in which host reads of tensors raise, and values of CPU tensors are treated as unknown."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


@clause("amp.grad_scaler.fused_step.waits_for_nothing")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_nothing_waits_for_the_device_that_decides(
    fused: FusedStep, device: str, kind: str, max_norm: float
) -> None:
    """The flag decides on its device, with the same bits. Only calls that are documented to wait may wait.

    Waiting is allowed in a first step and, on an accelerator, for an optimizer that counts steps on the host.
    """

    def unread(harness: Harness, *expected: float) -> torch.Tensor:
        is_first = not harness.optimizer.state
        may_wait = (kind == "dampened" and is_first) or (kind == "rmsprop" and (is_first or device != "cpu"))
        with contextlib.nullcontext() if may_wait else NoHostRead():
            return by_one(harness, *expected)

    with pytest.raises(AssertionError, match="on the host"), NoHostRead():
        torch.ones(()).item()
    grad_outcomes = [None, math.inf, None, math.nan, None]
    fused.judge_scenario(kind, grad_outcomes, max_norm, take=unread)


@clause("amp.grad_scaler.fused_step.waits_for_nothing")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_nothing_waits_for_the_device(deviation: DeviationJudge, reference: Library, max_norm: float) -> None:
    """Tensors on the meta device have no values, so reading one on the host or copying it there raises."""

    def probe(library: Library) -> Any:
        harness = Harness(library, "meta", SOME, AdamW, init_scale=8.0)
        norms = []
        for _ in range(2):
            harness.zero_grad()
            harness.backward()
            norms.append(by_one(harness, max_norm))
        return [norm.device.type for norm in norms]

    def compare(devices: Any) -> None:
        assert devices == ["meta", "meta"]

    FusedStep(deviation, reference, "meta").judge(probe, compare)


def _drop_one(params: list[torch.Tensor]) -> None:
    params[0].grad = None


def _replace_one(params: list[torch.Tensor]) -> None:
    params[0].grad = torch.full_like(params[0], 3.0)


def _clamp_all(params: list[torch.Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.clamp_(-0.5, 0.5)


@clause("amp.grad_scaler.fused_step.seen_as_a_step")
@TORCH_HAS_NO_FUSED_STEP
@pytest.mark.parametrize("everywhere", [False, True], ids=["its own", "of all optimizers"])
@pytest.mark.parametrize("does", [_drop_one, _replace_one, _clamp_all])
def test_step_uses_gradients_that_hooks_leave(
    fused: FusedStep, device: str, does: Callable[[list[torch.Tensor]], None], everywhere: bool
) -> None:
    """Hooks see unscaled gradients, and the step uses the gradients that they leave.

    The hooks are registered in the third step, after two steps without hooks.
    """

    def reported(library: Library, take: Take) -> list[Any]:
        harness = Harness(library, device, SOME, KINDS["adamw"], init_scale=8.0)
        states: list[Any] = []
        for iteration in range(4):
            harness.zero_grad()
            harness.backward()
            register = (
                register_optimizer_step_pre_hook if everywhere else harness.optimizer.register_step_pre_hook
            )
            hook = (
                register(lambda *_: does(harness.parameters)) if iteration == 2 else contextlib.nullcontext()
            )
            with hook:
                take(harness, math.inf)
            states.append(state_of(harness))
        return states

    fused.judge_states(reported)
