"""Scalers of both libraries in lockstep: any sequence of calls has the same outcomes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome, observe
from conformance.strategies.gradients import Gradient
from conformance.strategies.scaling import AMP_AWARE, PLAIN, Harness, pickled

KINDS = st.sampled_from([*PLAIN, *AMP_AWARE])
OPTIMIZER = st.integers(0, 2)
SCALES = st.sampled_from([0.5, 1.0, 3.0, 24.0, 65536.0])


def without_what_was_left(harness: Harness, outcome: Outcome) -> Outcome:
    """Remove attributes that torch leaves on the optimizer after a failed step, which is a separate deviation."""
    for name in ("grad_scale", "found_inf"):
        vars(harness.optimizer).pop(name, None)
    return dataclasses.replace(outcome, watched={**outcome.watched, **harness.seen()})


class ScalerTwins(RuleBasedStateMachine):
    """State machine over both libraries. Two harnesses share one scaler, and a third has no gradients."""

    def __init__(
        self, reference: Library, subject: Library, device: str, dtypes: tuple[torch.dtype, ...]
    ) -> None:
        super().__init__()
        self.libraries, self.device, self.dtypes = (reference, subject), device, dtypes
        self.sides: list[list[Harness]] = []
        # After a check that raised, torch's scaler stays in the middle of an iteration, which is a separate deviation.
        self.refused = False

    @initialize(
        kinds=st.tuples(KINDS, KINDS, KINDS),
        init_scale=SCALES,
        growth_interval=st.integers(1, 3),
        enabled=st.sampled_from([True] * 9 + [False]),
    )
    def begin(self, kinds: tuple[str, ...], init_scale: float, growth_interval: int, enabled: bool) -> None:
        first, last = self.dtypes[0], self.dtypes[-1]
        having = (
            Gradient((3,), first, seed=1),
            Gradient((2, 3), last, seed=2, layout="transposed"),
            Gradient((4,), None),  # no gradient
            Gradient((5,), last, seed=3),
        )
        for library in self.libraries:
            harnesses = [Harness(library, self.device, having, kind) for kind in kinds[:2]]
            harnesses.append(Harness(library, self.device, (Gradient((2,), None),), kinds[2]))
            scaler = library.amp.GradScaler(
                self.device, init_scale=init_scale, growth_interval=growth_interval, enabled=enabled
            )
            for harness in harnesses:
                harness.scaler = scaler
                harness.zero_grad()
            self.sides.append(harnesses)

    def both(self, which: int, call: Callable[[Harness], Callable[..., Any]], *args: Any) -> bool:
        """Make one call on both sides and compare the state of all harnesses. Return whether the call raised."""
        expected, actual = (self.everything(harnesses, which, call, *args) for harnesses in self.sides)
        for expected_outcome, actual_outcome in zip(expected, actual, strict=True):
            assert_same_outcome(expected_outcome, actual_outcome)
        raised = expected[0].raised
        if raised is not None and raised.text.startswith("No inf checks were recorded for this optimizer"):
            # torch now treats this optimizer as unscaled, which a separate clause covers, so start a new iteration.
            self.both(0, lambda harness: harness.scaler.update, 2.0)
        return raised is not None

    def everything(
        self, harnesses: list[Harness], which: int, call: Callable[[Harness], Callable[..., Any]], *args: Any
    ) -> list[Outcome]:
        harness = harnesses[which]
        real = [harness.optimizer if arg == "the optimizer" else arg for arg in args]
        outcome = harness.did(call(harness), *real)
        if outcome.raised is not None:
            outcome = without_what_was_left(harness, outcome)
        after = observe(harness.scaler.get_scale, watch=[other.parameters for other in harnesses])
        state = {"parameters": after.watched, "harnesses": [other.seen() for other in harnesses]}
        return [outcome, dataclasses.replace(after, watched=state)]

    @rule(which=st.integers(0, 1), last=st.sampled_from([None] * 4 + [math.inf, -math.inf, math.nan]))
    def backward(self, which: int, last: float | None) -> None:
        self.both(which, lambda harness: harness.backward, last)

    @rule(which=OPTIMIZER)
    def zero_grad(self, which: int) -> None:
        self.both(which, lambda harness: harness.zero_grad)

    @rule(which=st.integers(0, 1), factor=st.sampled_from([0.5, 0.0, math.inf]))
    def edit_gradients(self, which: int, factor: float) -> None:
        def edit(harness: Harness) -> Callable[[], None]:
            return lambda: [p.grad.mul_(factor) for p in harness.parameters if p.grad is not None] and None

        self.both(which, edit)

    @rule(value=st.sampled_from([1.0, -2.5, math.inf]), nested=st.booleans())
    def scale(self, value: float, nested: bool) -> None:
        def scaled(harness: Harness) -> Callable[[], Any]:
            tensor = torch.tensor([value, 1.0], device=self.device)
            return lambda: harness.scaler.scale([tensor, (tensor,)] if nested else tensor)

        self.both(0, scaled)

    @rule(which=OPTIMIZER)
    def unscale_(self, which: int) -> None:
        self.refused |= self.both(which, lambda harness: harness.scaler.unscale_, "the optimizer")

    @rule(which=OPTIMIZER)
    def step(self, which: int) -> None:
        self.refused |= self.both(which, lambda harness: harness.scaler.step, "the optimizer")

    @rule()
    def update(self) -> None:
        self.refused &= self.both(0, lambda harness: harness.scaler.update)

    @rule(new=SCALES, as_tensor=st.booleans())
    def update_to(self, new: float, as_tensor: bool) -> None:
        def updated(harness: Harness) -> Callable[[], None]:
            value = torch.tensor(new, device=self.device) if as_tensor else new
            return lambda: harness.scaler.update(value)

        self.refused &= self.both(0, updated)

    @rule(which=st.integers(0, 1), last=st.sampled_from([None, None, math.inf]))
    def whole_iteration(self, which: int, last: float | None) -> None:
        """Run a usual iteration, so that growth and backoff are often reached."""
        self.both(which, lambda harness: harness.zero_grad)
        self.both(which, lambda harness: harness.backward, last)
        self.refused |= self.both(which, lambda harness: harness.scaler.step, "the optimizer")
        self.refused &= self.both(which, lambda harness: harness.scaler.update)

    @rule(growth=st.sampled_from([1.5, 2.0, 4.0]))
    def set_growth_factor(self, growth: float) -> None:
        self.both(0, lambda harness: harness.scaler.set_growth_factor, growth)

    @rule(backoff=st.sampled_from([0.5, 0.25]))
    def set_backoff_factor(self, backoff: float) -> None:
        self.both(0, lambda harness: harness.scaler.set_backoff_factor, backoff)

    @rule(interval=st.integers(1, 3))
    def set_growth_interval(self, interval: int) -> None:
        self.both(0, lambda harness: harness.scaler.set_growth_interval, interval)

    @rule()
    def getters(self) -> None:
        names = ["growth_factor", "backoff_factor", "growth_interval"]
        self.both(0, lambda harness: lambda: [getattr(harness.scaler, f"get_{name}")() for name in names])

    @rule(scale=SCALES, tracker=st.integers(0, 2), empty=st.sampled_from([False, False, True]))
    def load_state_dict(self, scale: float, tracker: int, empty: bool) -> None:
        # A separate clause covers loading into a scaler without a scale and unscaling with it.
        self.both(0, lambda harness: harness.scaler.scale, torch.ones((), device=self.device))
        state = {
            "scale": scale,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2,
            "_growth_tracker": tracker,
        }
        self.both(0, lambda harness: harness.scaler.load_state_dict, {} if empty else state)

    @precondition(lambda self: not self.refused)
    @rule()
    def through_a_pickle(self) -> None:
        def replaced(harnesses: list[Harness]) -> Outcome:
            def replace() -> None:
                scaler = pickled(harnesses[0].scaler)
                for harness in harnesses:
                    harness.scaler = scaler

            return harnesses[0].did(replace)

        assert_same_outcome(*(replaced(harnesses) for harnesses in self.sides))
        # An unpickled scaler has no scale on the device yet.
        self.both(0, lambda harness: harness.scaler.scale, torch.ones((), device=self.device))


@clause("amp.grad_scaler.sequences.any")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float32 and float64"])
def test_any_sequence_of_calls(subject: Library, reference: Library, device: str, dtype: str) -> None:
    dtypes = tuple(getattr(torch, name) for name in dtype.split(" and "))
    run_state_machine_as_test(lambda: ScalerTwins(reference, subject, device, dtypes))
