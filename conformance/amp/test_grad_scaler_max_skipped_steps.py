"""`max_skipped_steps`: consecutive steps that were skipped raise, with the scales and the names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import clause
from conformance.judge.library import Library

SCALE = 1024.0


class Steps:
    """An optimizer of two parameters, and a scaler with a limit of skipped steps."""

    def __init__(self, library: Library, device: str, limit: int | None, how: str = "step") -> None:
        self.device, self.how = device, how
        self.params = {name: torch.nn.Parameter(torch.ones(3, device=device)) for name in ("first", "second")}
        self.optimizer = torch.optim.SGD([*self.params.items()], lr=0.125)
        self.scaler: Any = library.amp.GradScaler(
            device, init_scale=SCALE, growth_interval=100, max_skipped_steps=limit
        )

    def run(self, bad: float | None) -> None:
        """Run one step. `bad` replaces the gradient of the second parameter."""
        self.optimizer.zero_grad()
        loss = self.params["first"].sum() + (self.params["second"] * (1.0 if bad is None else bad)).sum()
        if self.how == "microbatch":
            with self.scaler.microbatch(self.optimizer):
                self.scaler.scale(loss).backward()
        else:
            self.scaler.scale(loss).backward()
        if self.how == "fused_step":
            self.scaler.fused_step(self.optimizer)
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def first_error(self, outcomes: list[float | None]) -> tuple[int, str] | None:
        """Return the index of the first step that raises, and the text. Wait for the device after each step."""
        for index, bad in enumerate(outcomes):
            try:
                self.run(bad)
            except RuntimeError as error:
                return index, str(error)
            if self.device != "cpu":
                torch.accelerator.synchronize()
        return None


@clause("amp.grad_scaler.update.max_skipped_steps")
@pytest.mark.parametrize("how", ["step", "fused_step", "microbatch"])
@given(outcomes=st.lists(st.sampled_from([None, math.inf, math.nan]), max_size=8), limit=st.integers(1, 3))
def test_consecutive_skipped_steps_raise(
    subject: Library, device: str, how: str, outcomes: list[float | None], limit: int
) -> None:
    """A step that is taken resets the count. On an accelerator the error may come one update later."""
    expected = next(
        (
            last
            for last in range(limit - 1, len(outcomes))
            if None not in outcomes[last - limit + 1 : last + 1]
        ),
        None,
    )
    error = Steps(subject, device, limit, how).first_error(outcomes)
    if device != "cpu" and expected is not None:
        expected = expected + 1 if expected + 1 < len(outcomes) else None
    assert (error and error[0]) == expected, error


@clause("amp.grad_scaler.update.max_skipped_steps")
@pytest.mark.parametrize("how", ["step", "microbatch"])
def test_error_has_scales_and_names(subject: Library, device: str, how: str) -> None:
    """The step that raises changes nothing, and a new scale starts again."""
    steps = Steps(subject, device, 3, how)
    error = steps.first_error([None, *[math.inf] * 6])
    assert error is not None
    scales = [f"{SCALE / 2**index:g}" for index in (1, 2)]
    assert all(scale in error[1] for scale in scales), error
    assert "second" in error[1], error
    assert "first" not in error[1], error
    scale = steps.scaler.get_scale()
    with pytest.raises(RuntimeError, match="max_skipped_steps=3"):
        steps.scaler.update()
    assert steps.scaler.get_scale() == scale
    steps.scaler.update(64.0)
    assert steps.first_error([math.inf, math.inf, None]) is None


@clause("amp.grad_scaler.update.max_skipped_steps")
@pytest.mark.parametrize("limit", [0, -1, math.nan])
def test_limit_below_one_raises(subject: Library, device: str, limit: float) -> None:
    with pytest.raises(ValueError, match=f"max_skipped_steps is {limit}"):
        subject.amp.GradScaler(device, max_skipped_steps=limit)


@clause("amp.grad_scaler.update.max_skipped_steps")
def test_no_limit_by_default(subject: Library, device: str) -> None:
    assert Steps(subject, device, None).first_error([math.inf] * 8) is None
