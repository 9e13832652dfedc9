"""What a claims file expects to be red: forgiven while it is, and told when it is no longer.

A red test that is expected counts as `expected`, not as red. An expectation none of whose tests fails has been met by
the subject, and goes: that is red, as `stale`, unless the tests draw their examples, so that another run may fail. One
whose date has passed is red, and forgives nothing.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import hypothesis
import pytest

from conformance.judge.claims_file import Expectation

# Not `stale`: that torch has changed is nothing that a subject does.
CAN_BE_EXPECTED = ("failed", "hang", "crash")
TELLS_NOTHING = ("not provided", "not claimed", "unavailable")
_SETTINGS = "_hypothesis_internal_use_settings"


@dataclass(frozen=True)
class Held:
    """An expectation after a run."""

    expectation: Expectation
    state: str  # holds, met, expired, not asked
    is_red: bool
    says: str

    @property
    def outcome(self) -> str:
        """As a test's would be."""
        if self.is_red:
            return "stale"
        return {"holds": "expected", "met": "passed"}.get(self.state, "not run")

    def as_dict(self) -> dict[str, Any]:
        row = asdict(self.expectation) | {"expires": self.expectation.expires.isoformat()}
        return row | {"state": self.state, "outcome": self.outcome, "says": self.says}


@dataclass(frozen=True)
class Seen:
    """What is to be known of a test that ran."""

    nodeid: str
    clause: str
    outcome: str
    draws: bool  # its examples, or its data


class Expectations:
    def __init__(self, rows: Sequence[Expectation], today: datetime.date) -> None:
        # What says more comes first: a row about a test and its parameters, one about the test, one about its clause.
        self.rows = sorted(rows, key=lambda row: (bool(row.clause), "[" not in row.test))
        self.today = today

    @classmethod
    def of(cls, config: pytest.Config) -> Expectations:
        return config.stash.get(_KEY, _NONE)

    def keep(self, config: pytest.Config) -> None:
        config.stash[_KEY] = self

    def find(self, nodeid: str, clause: str) -> Expectation | None:
        """The one that a test's failure is forgiven by."""
        return next(
            (row for row in self.rows if row.covers(nodeid, clause) and not self._has_expired(row)), None
        )

    def held(self, tests: Iterable[Seen], *, is_whole: bool) -> list[Held]:
        """What became of each in a run; of some tests of a clause that pass nothing follows, unless it `is_whole`."""
        asked = [test for test in tests if test.outcome not in TELLS_NOTHING]
        return [
            self._held(row, [test for test in asked if row.covers(test.nodeid, test.clause)], is_whole)
            for row in self.rows
        ]

    def _held(self, row: Expectation, tests: Sequence[Seen], is_whole: bool) -> Held:
        if not tests:
            return Held(row, "not asked", False, "no test of it ran")
        if self._has_expired(row):
            return Held(
                row,
                "expired",
                True,
                f"its date, {row.expires}, has passed: mend it, or look into it and set another",
            )
        failing = sum(test.outcome in ("expected", *CAN_BE_EXPECTED) for test in tests)
        if failing:
            return Held(row, "holds", False, f"{failing} of {len(tests)} tests fail")
        if any(test.draws for test in tests):
            return Held(row, "met", False, "all its tests pass, with the examples that this run drew")
        if row.clause and not is_whole:
            return Held(row, "met", False, "those of its tests that this run was given pass")
        return Held(row, "met", True, "all its tests pass: take it out of the claims file")

    def _has_expired(self, row: Expectation) -> bool:
        return row.expires < self.today


_NONE = Expectations((), datetime.date.min)
_KEY = pytest.StashKey[Expectations]()


def forgiven(row: Expectation) -> str:
    """Why a failure is none, for its reader."""
    return f"expected until {row.expires}: {row.reason}{f' ({row.link})' if row.link else ''}"


@contextlib.contextmanager
def unshrunk(function: Any) -> Generator[None]:
    """Let a test's failing example be told as it was found: that of an expected failure is known."""
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
