"""What every twin test comes down to: one probe, both libraries, and all that is seen of them compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.judge.tolerances import EXACT, Tolerance


class Compare:
    """The fixture `compare`: what a probe sees of the reference and of the subject must be the same."""

    def __init__(self, reference: Library, subject: Library) -> None:
        self._reference, self._subject = reference, subject

    def __repr__(self) -> str:
        return f"Compare({self._reference.spec!r}, {self._subject.spec!r})"

    def __call__(
        self, probe: Callable[[Library], Outcome | Iterable[Outcome]], tolerance: Tolerance = EXACT
    ) -> None:
        """A probe that yields an `Outcome` a call is a scenario: both libraries run it in lockstep, step by step."""
        expected, actual = probe(self._reference), probe(self._subject)
        if isinstance(expected, Outcome):
            assert isinstance(actual, Outcome)
            assert_same_outcome(expected, actual, tolerance)
        else:
            assert not isinstance(actual, Outcome)
            _assert_same_steps(expected, actual, tolerance)


def _assert_same_steps(
    reference: Iterable[Outcome], subject: Iterable[Outcome], tolerance: Tolerance
) -> None:
    number = -1
    for number, (expected, actual) in enumerate(itertools.zip_longest(reference, subject)):
        assert expected is not None, f"the subject's scenario goes on after {number} steps: {actual}"
        assert actual is not None, f"the subject's scenario ends after {number} steps, before {expected}"
        try:
            assert_same_outcome(expected, actual, tolerance)
        except AssertionError as error:
            error.add_note(f"in step {number} of the scenario, counted from 0")
            raise
    assert number >= 0, "the scenario has no steps"
