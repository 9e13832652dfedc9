"""GradScaler on optimizers with more than two parameter groups processes every group."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.sandbox.global_state import default_dtype
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import OPTIMIZERS, Harness


def one_each(groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer with one group for each parameter."""
    return OPTIMIZERS["recording"]([{"params": [p]} for group in groups for p in group["params"]])


@clause("amp.grad_scaler.unscale_.finds_nonfinite")
@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("value", [math.inf, math.nan], ids=repr)
def test_finds_it_in_every_group(subject: Library, device: str, where: int, value: float) -> None:
    gradients = [Gradient((3,), seed=seed) for seed in range(4)]
    gradients[where] = dataclasses.replace(gradients[where], last=value)
    harness = Harness(subject, device, tuple(gradients), optimizer=one_each, init_scale=8.0).used()
    assert len(harness.optimizer.param_groups) == 4
    harness.scaler.step(harness.optimizer)
    harness.scaler.update()
    assert harness.optimizer.calls == [], "the optimizer stepped although a gradient is not finite"
    assert harness.scaler.get_scale() == 4.0


@clause("amp.grad_scaler.unscale_.divides")
def test_divides_in_every_group(compare: Compare, device: str) -> None:
    """Every group is divided by the current scale, also after the scale has moved."""

    def scenario(library: Library) -> Iterator[Outcome]:
        gradients = tuple(Gradient((3,), seed=seed) for seed in range(4))
        harness = Harness(library, device, gradients, optimizer=one_each, init_scale=8.0, growth_interval=1)
        for last in (None, math.inf, None, None):
            yield from harness.iteration(last, unscale=True)

    compare(scenario)


@clause("amp.grad_scaler.unscale_.divides")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_under_another_default_dtype(compare: Compare, device: str, dtype: torch.dtype) -> None:
    def scenario(library: Library) -> Iterator[Outcome]:
        harness = Harness(library, device, init_scale=8.0, growth_interval=1)
        for last in (None, math.inf, None):
            yield from harness.iteration(last)
        yield harness.did(harness.scaler.load_state_dict, harness.scaler.state_dict())

    with default_dtype(dtype):
        compare(scenario)
