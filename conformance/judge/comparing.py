"""Comparison of the subject with the reference: run one probe on both libraries and compare the outcomes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.judge.tolerances import EXACT, Tolerance


class Compare:
    """The fixture `compare`, which fails a test if a probe has different outcomes on reference and subject."""

    def __init__(self, reference: Library, subject: Library) -> None:
        self._reference, self._subject = reference, subject

    def __repr__(self) -> str:
        return f"Compare({self._reference.spec!r}, {self._subject.spec!r})"

    def __call__(
        self, probe: Callable[[Library], Outcome | Iterable[Outcome]], tolerance: Tolerance = EXACT
    ) -> list[Outcome]:
        """Run `probe` on both libraries and compare the outcomes. Return the subject's.

        A probe that yields an `Outcome` for each call is a scenario, which both libraries run in lockstep.
        """
        expected, actual = probe(self._reference), probe(self._subject)
        if isinstance(expected, Outcome):
            assert isinstance(actual, Outcome)
            assert_same_outcome(expected, actual, tolerance)
            return [actual]
        assert not isinstance(actual, Outcome)
        return _compare_steps(expected, actual, tolerance)


def _compare_steps(
    reference: Iterable[Outcome], subject: Iterable[Outcome], tolerance: Tolerance
) -> list[Outcome]:
    outcomes = []
    for number, (expected, actual) in enumerate(itertools.zip_longest(reference, subject)):
        assert expected is not None, f"the subject's scenario continues after {number} steps: {actual}"
        assert actual is not None, f"the subject's scenario ends after {number} steps, before {expected}"
        try:
            assert_same_outcome(expected, actual, tolerance)
        except AssertionError as error:
            error.add_note(f"in step {number} of the scenario, counted from 0")
            raise
        outcomes.append(actual)
    assert outcomes, "the scenario has no steps"
    return outcomes
