"""Accounts of the clauses that a run has no test of, so that every clause of the catalogue has an outcome and a reason.

The outcome of a clause may be known before any test: the subject lacks its names or does not claim it, or it does not
hold for the installed torch. Its tests are not scheduled, and files with no other tests are not imported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from conformance.judge.clauses import AREAS, HERE, Clause, all_clauses
from conformance.judge.files.claims import claimed_extensions
from conformance.judge.sandbox.trial import SubjectInfo

NOT_RUN = "not run"
OTHER_SHARD = "its tests are in other shards"
_CALL, _LITERAL = re.compile(r"\bclause\("), re.compile(r'\bclause\(\s*"([^"]+)"')


@dataclass(frozen=True)
class NotRun:
    """A clause of the catalogue that no test of a run belongs to."""

    clause: str
    outcome: str  # not provided, not claimed, unavailable, or `NOT_RUN`
    reason: str
    is_red: ClassVar[bool] = False


def known_before(spec: str, info: SubjectInfo) -> dict[str, NotRun]:
    """Return the clauses whose outcome is known before any test.

    The names of a subject whose lookup ended a process are unknown. The tests show which name it was.
    """
    results = (_known_before(clause, spec, info) for clause in all_clauses().values())
    return {result.clause: result for result in results if result is not None}


def _known_before(clause: Clause, spec: str, info: SubjectInfo) -> NotRun | None:
    extensions = claimed_extensions(spec)
    if not clause.holds_here:
        return NotRun(clause.id, "unavailable", f"its clause does not hold for torch {torch.__version__}")
    if clause.level == "extension" and clause.id not in extensions:
        return NotRun(clause.id, "not claimed", f"{spec} does not claim this extension")
    if info.claims is None or info.provided is None or not clause.names or clause.id in extensions:
        return None
    if info.provided.isdisjoint(clause.names) and not any(
        _is_claimed(name, info.claims) for name in clause.names
    ):
        return NotRun(clause.id, "not provided", f"{spec} does not provide {clause.names[0]}")
    return None


def _is_claimed(name: str, claims: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in claims for count in range(1, len(parts) + 1))


@functools.cache
def clauses_of_file(file: Path) -> frozenset[str]:
    """Return the clauses of the tests in a file, without importing it.

    The result is empty if the file does not judge a subject, or if a clause is not written as a string literal.
    """
    if not file.is_relative_to(HERE) or file.relative_to(HERE).parts[0] not in AREAS:
        return frozenset()
    text = file.read_text()
    ids = _LITERAL.findall(text)
    return frozenset(ids if len(ids) == len(_CALL.findall(text)) else ())


def account(
    tested: Collection[str], known: Mapping[str, NotRun], collected: Collection[str], why: str
) -> list[NotRun]:
    """Return every clause of the catalogue that is not in `tested`.

    Args:
        known: reasons that the selection of tests has recorded.
        collected: clauses with tests that were to run, but did not.
        why: why tests of `collected` did not run.
    """
    return [
        known.get(name) or NotRun(name, NOT_RUN, why if name in collected else "no test of it was selected")
        for name in all_clauses()
        if name not in tested
    ]
