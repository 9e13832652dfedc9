"""The clause matrix, with the worst outcome of each clause by device, dtype and world size."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conformance.judge.accounting import NOT_RUN, NotRun
from conformance.judge.judgement import FLAKY, RED


class Look(NamedTuple):
    """Sign and meaning of an outcome on a page. The sign is for readers who cannot distinguish colours."""

    sign: str
    meaning: str


# Outcomes from worst to best. A cell shows the worst of its tests.
OUTCOMES = {
    "crash": Look("✖", "the test ended its process"),
    "hang": Look("⧗", "the test exceeded its deadline"),
    "failed": Look("✗", "the subject differs from torch"),
    "stale": Look("≠", "torch no longer does what a deviation or limit says, or an expected failure passes"),
    FLAKY: Look("~", "runs with the same seed had different outcomes"),
    "expected": Look("!", "the test failed, as the subject's claims file says"),
    NOT_RUN: Look(
        "?", "no test of the clause was in this run, because of the profile, the selection or an early end"
    ),
    "not provided": Look("∅", "the subject lacks the name and does not claim it"),
    "not claimed": Look("○", "an extension beyond torch that the subject does not claim"),
    "unavailable": Look("–", "this machine lacks a device, ranks or a compiler"),
    "reference cannot run here": Look("⊘", "torch itself fails here"),
    "known": Look("≈", "the subject does what torch does, where impl deviates on purpose"),
    "passed": Look("✓", "the subject does what torch does, or what the deviation says"),
}
SEVERITY = tuple(OUTCOMES)


@dataclass(frozen=True)
class Axis:
    """A column of the matrix. An empty field means that the tests choose the value or need none."""

    device: str
    dtype: str
    world_size: str

    @property
    def parts(self) -> list[str]:
        dtype = "default dtype" if self.dtype == "None" else self.dtype
        world = f"world\N{NO-BREAK SPACE}{self.world_size}" if self.world_size else ""
        return [part for part in (self.device or "any device", dtype, world) if part]

    @property
    def label(self) -> str:
        return " · ".join(self.parts)

    @property
    def anchor(self) -> str:
        return re.sub(r"[^\w.]+", "-", "-".join((self.device or "any", self.dtype, self.world_size))).strip(
            "-"
        )


@dataclass(frozen=True)
class Calm:
    """Tests of one function that are not red and have the same outcome and reason, with their parameters."""

    outcome: str
    function: str
    reason: str
    parameters: list[str]


@dataclass
class Cell:
    tests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def red(self) -> list[dict[str, Any]]:
        return [test for test in self.tests if test["outcome"] in RED]

    @property
    def calm(self) -> list[Calm]:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for test in self.tests:
            if test["outcome"] not in RED:
                function, bracket, parameters = test["nodeid"].partition("[")
                same = groups.setdefault((test["outcome"], function, test["reason"]), [])
                same += [bracket + parameters] if bracket else []
        return [Calm(*same, parameters) for same, parameters in groups.items()]

    @property
    def outcome(self) -> str:
        return worst_outcome(self.tests)


@dataclass
class Row:
    clause: dict[str, Any]
    cells: dict[Axis, Cell]
    untested: NotRun  # outcome and reason if there are no cells

    @property
    def outcome(self) -> str:
        outcomes = (cell.outcome for cell in self.cells.values())
        return min(outcomes, key=SEVERITY.index, default=self.untested.outcome)

    @property
    def short_id(self) -> str:
        return self.clause["id"].removeprefix(self.clause["area"] + ".")

    @property
    def is_red(self) -> bool:
        return self.outcome in RED


@dataclass
class Area:
    name: str
    axes: list[Axis]
    rows: list[Row]

    @property
    def outcome(self) -> str:
        return min((row.outcome for row in self.rows), key=SEVERITY.index)

    @property
    def is_red(self) -> bool:
        return any(row.is_red for row in self.rows)

    @property
    def is_judged(self) -> bool:
        """Whether the subject provides any name of the area and tests of it ran."""
        return any(row.cells and row.outcome not in ("not provided", "not claimed") for row in self.rows)

    @property
    def counts(self) -> list[tuple[str, int]]:
        """Number of tested clauses with each outcome, the worst first."""
        return ranked(row.outcome for row in self.rows if row.cells)

    @property
    def untested(self) -> list[Row]:
        return [row for row in self.rows if not row.cells]


def worst_outcome(tests: Iterable[dict[str, Any]]) -> str:
    return min((test["outcome"] for test in tests), key=SEVERITY.index)


def ranked(outcomes: Iterable[str]) -> list[tuple[str, int]]:
    """Return the number of each outcome, the worst first."""
    return sorted(Counter(outcomes).items(), key=lambda entry: SEVERITY.index(entry[0]))


def matrix(report: dict[str, Any]) -> list[Area]:
    """Return a table for each area, with the columns of its tests: red areas first, areas without tests last."""
    tests = tests_by_clause(report)
    accounts = not_run_by_clause(report)
    areas: dict[str, list[Row]] = {}
    for clause in report["clauses"]:
        row = Row(clause, _cells(tests.get(clause["id"], [])), accounts[clause["id"]])
        areas.setdefault(clause["area"], []).append(row)
    tables = [Area(name, _axes(rows), rows) for name, rows in sorted(areas.items())]
    return sorted(tables, key=lambda area: (not area.is_red, not area.is_judged))


def tests_by_clause(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    tests: dict[str, list[dict[str, Any]]] = {}
    for test in report["tests"]:
        tests.setdefault(test["clause"], []).append(test)
    return tests


@dataclass(frozen=True)
class MarkCounts:
    """The clauses with one mark, by what a run has shown of them."""

    name: str
    clauses: int
    tested: int
    hold: int
    broken: int


def by_mark(areas: Sequence[Area]) -> list[MarkCounts]:
    """Return the counts of each mark. Reports of earlier versions have no marks."""
    rows: dict[str, list[Row]] = {}
    for row in (row for area in areas for row in area.rows if "mark" in row.clause):
        rows.setdefault(row.clause["mark"], []).append(row)
    return [
        MarkCounts(
            name,
            len(of_mark),
            sum(bool(row.cells) for row in of_mark),
            sum(row.outcome in ("passed", "known") for row in of_mark),
            sum(row.is_red for row in of_mark),
        )
        for name, of_mark in sorted(rows.items())
    ]


def not_run_by_clause(report: dict[str, Any]) -> Mapping[str, NotRun]:
    """Return the account of each clause without tests. Reports of earlier versions have no reasons."""
    accounts = {result["clause"]: NotRun(**result) for result in report.get("not_run", [])}
    return {
        name: accounts.get(name, NotRun(name, NOT_RUN, "no test of it was selected"))
        for name in (clause["id"] for clause in report["clauses"])
    }


def _cells(tests: Sequence[dict[str, Any]]) -> dict[Axis, Cell]:
    cells: dict[Axis, Cell] = {}
    for test in tests:
        cells.setdefault(Axis(test["device"], test["dtype"], test["world_size"]), Cell()).tests.append(test)
    return cells


def _axes(rows: Sequence[Row]) -> list[Axis]:
    return sorted(
        {axis for row in rows for axis in row.cells},
        key=lambda axis: (axis.device, axis.world_size, axis.dtype),
    )
