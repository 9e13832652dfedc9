"""Expected failures of a claims file, and what became of each in a run.

A failed test that is expected has the outcome `expected`, which is not red. If all tests of an expectation pass, it
must be removed: it is red, as `stale`, unless its tests draw examples, because another run may draw one that fails. An
expectation whose date has passed is red, and its tests count as failed.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import hypothesis
import pytest

from conformance.judge.files.claims_file import Expectation

# Without `stale`, because a change of torch is not a failure of the subject.
CAN_BE_EXPECTED = ("failed", "hang", "crash")
NOT_JUDGED = ("not provided", "not claimed", "unavailable")
_SETTINGS = "_hypothesis_internal_use_settings"


@dataclass(frozen=True)
class ExpectationResult:
    """The state of an expectation after a run."""

    expectation: Expectation
    state: str  # holds, met, expired, not asked
    is_red: bool
    says: str

    @property
    def outcome(self) -> str:
        """The outcome that a test in this state would have."""
        if self.is_red:
            return "stale"
        return {"holds": "expected", "met": "passed"}.get(self.state, "not run")

    def as_dict(self) -> dict[str, Any]:
        row = asdict(self.expectation) | {"expires": self.expectation.expires.isoformat()}
        return row | {"state": self.state, "outcome": self.outcome, "says": self.says}


@dataclass(frozen=True)
class TestRecord:
    """A test that ran, with what expectations need to know about it."""

    nodeid: str
    clause: str
    outcome: str
    draws: bool  # whether it draws examples or data


class Expectations:
    def __init__(self, rows: Sequence[Expectation], today: datetime.date) -> None:
        # The most specific comes first: a test with its parameters, then a test, then a clause.
        self.rows = sorted(rows, key=lambda row: (bool(row.clause), "[" not in row.test))
        self.today = today

    @classmethod
    def of_run(cls, config: pytest.Config) -> Expectations:
        return config.stash.get(_KEY, _NONE)

    def keep(self, config: pytest.Config) -> None:
        config.stash[_KEY] = self

    def find(self, nodeid: str, clause: str) -> Expectation | None:
        """Return the expectation that covers a failure of a test, or None."""
        return next(
            (row for row in self.rows if row.covers(nodeid, clause) and not self._has_expired(row)), None
        )

    def evaluate(self, tests: Iterable[TestRecord], *, is_complete: bool) -> list[ExpectationResult]:
        """Return the state of each expectation after a run of `tests`.

        If all tests of a clause pass, its expectation is stale only if the run `is_complete`.
        """
        judged = [test for test in tests if test.outcome not in NOT_JUDGED]
        return [
            self._evaluate(
                row, [test for test in judged if row.covers(test.nodeid, test.clause)], is_complete
            )
            for row in self.rows
        ]

    def _evaluate(
        self, row: Expectation, tests: Sequence[TestRecord], is_complete: bool
    ) -> ExpectationResult:
        if not tests:
            return ExpectationResult(row, "not asked", False, "none of its tests ran")
        if self._has_expired(row):
            return ExpectationResult(
                row,
                "expired",
                True,
                f"its date, {row.expires}, has passed: fix the failure, or set a new date",
            )
        failing = sum(test.outcome in ("expected", *CAN_BE_EXPECTED) for test in tests)
        if failing:
            return ExpectationResult(row, "holds", False, f"{failing} of {len(tests)} tests fail")
        if any(test.draws for test in tests):
            return ExpectationResult(
                row, "met", False, "all its tests pass, with the examples that this run drew"
            )
        if row.clause and not is_complete:
            return ExpectationResult(row, "met", False, "all its tests that were selected for this run pass")
        return ExpectationResult(row, "met", True, "all its tests pass: remove it from the claims file")

    def _has_expired(self, row: Expectation) -> bool:
        return row.expires < self.today


_NONE = Expectations((), datetime.date.min)
_KEY = pytest.StashKey[Expectations]()


def expected_failure_text(row: Expectation) -> str:
    """Return the text that the report shows for an expected failure."""
    return f"expected until {row.expires}: {row.reason}{f' ({row.link})' if row.link else ''}"


@contextlib.contextmanager
def without_shrinking(function: Any) -> Generator[None]:
    """Context manager in which Hypothesis does not shrink failing examples, which is slow and useless if expected."""
    settings = getattr(function, _SETTINGS, None)
    if settings is None:
        yield
        return
    phases = [phase for phase in settings.phases if phase is not hypothesis.Phase.shrink]
    setattr(function, _SETTINGS, hypothesis.settings(settings, phases=phases))
    try:
        yield
    finally:
        setattr(function, _SETTINGS, settings)
