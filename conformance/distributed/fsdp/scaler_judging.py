"""Comparison of scaler programs that ranks ran, rank by rank, and properties of their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from conformance.distributed.fsdp.scaler_cases import SCALER, ScalerProgram, play
from conformance.distributed.fsdp.twins import Twins
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.ranks.collective_traces import Collective

# For each rank, the outcome of each call.
ScalerOutcomes = Sequence[Sequence[Outcome]]


def on_ranks(twins: Twins, library: Library, case: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Run a case on every rank. Return one result per rank."""
    # A missing scaler is detected here, so that it is reported as not provided.
    library.find(SCALER)
    return twins.pool.run(case, library=library.spec, **arguments)


def played(twins: Twins, plan: ScalerProgram, library: Library | None = None) -> ScalerOutcomes:
    """Run the plan on the ranks of `library`, by default the subject."""
    return on_ranks(twins, library or twins.subject, play, plan=plan)


def assert_same(twins: Twins, plan: ScalerProgram) -> ScalerOutcomes:
    """Run the plan on the ranks of both libraries and compare the outcome of every call.

    Return the subject's outcomes.
    """
    expected, actual = played(twins, plan, twins.reference), played(twins, plan)
    for rank, (expected_calls, actual_calls) in enumerate(zip(expected, actual, strict=True)):
        for call, outcome, expected_outcome in zip(plan.calls, actual_calls, expected_calls, strict=True):
            if expected_outcome is None:
                assert outcome is None
                continue
            try:
                assert_same_outcome(expected_outcome, outcome)
            except AssertionError as error:
                error.add_note(f"on rank {rank} of {len(actual)}, at {call}")
                raise
    return actual


def scales(outcomes: ScalerOutcomes) -> list[float]:
    """Return each rank's scale after the last call."""
    return [calls[-1].watched["scaler"]["scale"] for calls in outcomes]


def stepped(outcomes: ScalerOutcomes, plan: ScalerProgram) -> list[list[bool]]:
    """Return, for each rank, whether each `step` of the plan moved the parameters.

    Every parameter must have a gradient.
    """
    moved: list[list[bool]] = []
    for calls in outcomes:
        weights = [_weights(outcome) for outcome in calls]
        moved.append(
            [
                not all(map(torch.equal, weights[place - 1], weights[place]))
                for place, call in enumerate(plan.calls)
                if call.name == "step"
            ]
        )
    return moved


def _weights(outcome: Outcome) -> list[torch.Tensor]:
    states = [state["data"] if isinstance(state, dict) else state for state in outcome.watched["parameters"]]
    return [state.values for state in states]


def issued(twins: Twins) -> list[list[Collective]]:
    """Return the collectives of the last case, for each rank."""
    return [list(trace) for trace in twins.pool.traces]
