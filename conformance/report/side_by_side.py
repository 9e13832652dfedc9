"""Comparison page of several reports, of subjects or of versions. Cells that differ have a replay command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.judge.accounting import NOT_RUN, NotRun
from conformance.judge.judgement import RED
from conformance.report.matrix import SEVERITY, not_run_by_clause, tests_by_clause, worst_outcome
from conformance.report.page import environment
from conformance.report.text import legible
from conformance.report.verdict import parts

_NO_CLAUSE = "the catalogue of this report has no such clause"


@dataclass(frozen=True)
class ComparedCell:
    """A clause in a report."""

    tests: list[dict[str, Any]]
    replay: str  # replay command of the first red test, else of the clause
    untested: NotRun  # outcome and reason if there are no tests

    @property
    def outcome(self) -> str:
        return worst_outcome(self.tests) if self.tests else self.untested.outcome

    @property
    def held_tests(self) -> int:
        return sum(test["outcome"] in ("passed", "known") for test in self.tests)

    @property
    def why(self) -> str:
        worst = [test for test in self.tests if test["outcome"] == self.outcome]
        return worst[0]["reason"] if worst else self.untested.reason


@dataclass(frozen=True)
class ComparedRow:
    clause: dict[str, Any]
    cells: list[ComparedCell]

    @property
    def differs(self) -> bool:
        return len({cell.outcome for cell in self.cells}) > 1


@dataclass(frozen=True)
class ComparedArea:
    name: str
    rows: list[ComparedRow]

    @property
    def different(self) -> list[ComparedRow]:
        return [row for row in self.rows if row.differs]

    @property
    def alike(self) -> list[ComparedRow]:
        return [row for row in self.rows if not row.differs]

    def held_clauses(self, column: int) -> str:
        """Return the number of clauses that hold in a report, and of those that its run tested."""
        tested = [row.cells[column] for row in self.rows if row.cells[column].tests]
        held = sum(cell.outcome in ("passed", "known") for cell in tested)
        return f"{held} / {len(tested)}" if tested else "not tested"


def write_side_by_side(reports: Sequence[dict[str, Any]], file: Path) -> None:
    """Write the comparison page of several reports. All texts are made legible and escaped."""
    reports = [legible(report) for report in reports]
    areas = side_by_side(reports)
    outcomes = {cell.outcome for area in areas for row in area.rows for cell in row.cells}
    page = (
        environment()
        .get_template("side_by_side.html")
        .render(
            reports=reports,
            says=[parts(report)[0].says for report in reports],
            areas=areas,
            outcomes=sorted(outcomes, key=SEVERITY.index),
        )
    )
    file.write_text(page, encoding="utf-8")


def side_by_side(reports: Sequence[dict[str, Any]]) -> list[ComparedArea]:
    """Return the clauses of all reports by area, areas with differences first.

    The sentence of a clause is that of the last report that has it.
    """
    clauses = {clause["id"]: clause for report in reports for clause in report["clauses"]}
    tests_by_report = [tests_by_clause(report) for report in reports]
    accounts_by_report = [not_run_by_clause(report) for report in reports]
    areas: dict[str, list[ComparedRow]] = {}
    for name, clause in clauses.items():
        cells = [
            _cell(name, tests.get(name, []), report, accounts.get(name, NotRun(name, NOT_RUN, _NO_CLAUSE)))
            for tests, accounts, report in zip(tests_by_report, accounts_by_report, reports, strict=True)
        ]
        areas.setdefault(clause["area"], []).append(ComparedRow(clause, cells))
    compared = [ComparedArea(name, rows) for name, rows in sorted(areas.items())]
    return sorted(compared, key=lambda area: not area.different)


def _cell(clause: str, tests: list[dict[str, Any]], report: dict[str, Any], untested: NotRun) -> ComparedCell:
    red = [test["replay"] for test in tests if test["outcome"] in RED and test["replay"]]
    replay = red[0] if red else report.get("replay", "").replace(" WHAT ", f" {clause} ")
    return ComparedCell(tests, replay, untested)
