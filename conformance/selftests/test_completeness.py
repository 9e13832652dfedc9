"""Every public name, method and parameter has a clause; every clause has a test; every row belongs to a clause."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import pytest

from conformance.judge import surface
from conformance.judge.clauses import AREAS, HERE, all_clauses
from conformance.judge.files.rows import all_deviations, all_reference_limits
from conformance.strength.faults.generated import has_effect

_FILES = [file for area in AREAS for file in sorted((HERE / area).rglob("test_*.py"))]
_SOURCES = [file.read_text() for file in _FILES]
_ASKED = {clause_id for source in _SOURCES for clause_id in re.findall(r'\bclause\(\s*"([^"]+)"', source)}


def _judged_by_rows() -> Iterator[tuple[str, str, str]]:
    """Yield each test that a row judges, with its clause and the row. A mark may be stored under a name."""
    for file in _FILES:
        module = ".".join(file.relative_to(HERE.parent).with_suffix("").parts)
        for name, test in vars(importlib.import_module(module)).items():
            marks = {mark.name: mark.args for mark in getattr(test, "pytestmark", ())}
            if "deviation" in marks:
                yield f"{module}.{name}", *marks["clause"], *marks["deviation"]


_JUDGED_BY_ROWS = list(_judged_by_rows())


@pytest.mark.parametrize("item", [*filter(has_effect, surface.items())], ids=str)
def test_every_item_has_a_clause(item: surface.SurfaceItem) -> None:
    covering = [clause.id for clause in all_clauses().values() if str(item) in clause.covers]
    if not (item.method or item.parameter):
        covering += [
            clause.id
            for clause in all_clauses().values()
            if any(_within(name, item) for name in clause.covers)
        ]
    assert covering, f"no clause covers torch.{item}"


def _within(covered: str, item: surface.SurfaceItem) -> bool:
    return covered.startswith((f"{item.path}.", f"{item.path}("))


@pytest.mark.parametrize("clause_id", list(all_clauses()))
def test_every_clause_is_asked(clause_id: str) -> None:
    assert clause_id in _ASKED, f"no test asks about {clause_id}: it is uncovered"


@pytest.mark.parametrize(
    "clause", [clause for clause in all_clauses().values() if clause.holds_here], ids=lambda clause: clause.id
)
def test_clauses_cover_what_exists(clause: object) -> None:
    real = set(map(str, surface.items()))
    # An extension may cover names that only a later torch has.
    assert clause.level == "extension" or [name for name in clause.covers if name not in real] == []
    assert clause.says.endswith("."), "a clause is one sentence"


@pytest.mark.parametrize("row", list(all_deviations().values()), ids=lambda row: row.id)
def test_deviations_are_asserted(row: object) -> None:
    judged = {clause for _, clause, row_id in _JUDGED_BY_ROWS if row_id == row.id}
    assert set(row.clauses) <= all_clauses().keys() & judged, f"no test asserts both sides of {row.id}"


def test_rows_judge_tests_of_their_own_clause() -> None:
    """A row excuses what torch does. In a test of another clause it would excuse what every subject must do.

    A row excuses nothing in a test of an extension, which the subject has claimed.
    """
    rows, clauses = all_deviations(), all_clauses()
    excused = [entry for entry in _JUDGED_BY_ROWS if clauses[entry[1]].level != "extension"]
    assert [entry for entry in excused if entry[1] not in rows[entry[2]].clauses] == []


@pytest.mark.parametrize("row", list(all_reference_limits().values()), ids=lambda row: row.id)
def test_reference_limits_are_asserted(row: object) -> None:
    assert set(row.clauses) <= all_clauses().keys()
    asserted = {
        limit_id
        for source in _SOURCES
        for limit_id in re.findall(r'mark\.reference_limit\(\s*"([^"]+)"', source)
    }
    assert row.id in asserted, f"no test asserts {row.id}"
