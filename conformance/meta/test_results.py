"""What a report's tests add up to: the clauses a subject breaks, and what it does not have at all."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import clauses
from conformance.claims import claims, is_claimed
from conformance.library import NotProvided, load_library
from conformance.outcome import observe
from conformance.results import broken_clauses

FIRST, SECOND = (clause["id"] for clause in clauses.for_report()[:2])


def entry(nodeid: str, clause: str, outcome: str) -> dict[str, Any]:
    return {"nodeid": nodeid, "clause": clause, "outcome": outcome, "replay": f"pytest {nodeid}"}


def test_a_broken_clause_is_told_once_and_the_most_broken_first() -> None:
    tests = [
        entry("a", FIRST, "failed"),
        entry("b", FIRST, "passed"),
        entry("c", SECOND, "hang"),
        entry("d", SECOND, "failed"),
        entry("own", "", "failed"),
        entry("e", FIRST, "unavailable"),
    ]
    broken = broken_clauses(tests)
    assert [each.name for each in broken] == [*sorted([SECOND, "own"]), FIRST]
    told = {each.name: each for each in broken}
    assert told[FIRST].count == "failed in 1 of 3 tests"
    assert told[FIRST].replay == "pytest a"
    assert told[SECOND].count == "failed, hang in 2 of 2 tests"
    assert told[SECOND].says == next(c["says"] for c in clauses.for_report() if c["id"] == SECOND)
    assert told["own"].count == "failed in 1 of 1 test"


def test_nothing_red_is_nothing_broken() -> None:
    assert broken_clauses([entry("a", FIRST, "passed"), entry("b", FIRST, "known")]) == []


def test_what_a_subject_lacks_is_no_outcome_of_its_call() -> None:
    lacking = load_library("math")
    with pytest.raises(NotProvided, match="math does not provide amp"):
        observe(lambda: lacking.amp.GradScaler("cpu"))


def test_a_planted_lack_is_still_claimed() -> None:
    spec = "torch+lack:amp.grad_scaler.OptState"
    assert claims(spec) == claims("torch")
    assert is_claimed(load_library(spec), "amp.grad_scaler.OptState")
