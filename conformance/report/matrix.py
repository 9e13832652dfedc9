"""The clause matrix: clause × (device, dtype, world size) → the worst outcome among its tests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.judge.judgement import RED

# From worst to best; a cell shows the worst of its tests.
SEVERITY = (
    "crash",
    "hang",
    "failed",
    "stale",
    "expected",
    "uncovered",
    "not provided",
    "not claimed",
    "unavailable",
    "reference cannot run here",
    "known",
    "passed",
)
# A sign beside the colour, for those who cannot tell the colours apart.
SIGNS = {
    "crash": "✖",
    "hang": "⧗",
    "failed": "✗",
    "stale": "≠",
    "expected": "!",
    "uncovered": "?",
    "not provided": "∅",
    "not claimed": "○",
    "unavailable": "–",
    "reference cannot run here": "⊘",
    "known": "≈",
    "passed": "✓",
}
MEANINGS = {
    "crash": "the process that ran it died",
    "hang": "it did not end before its deadline",
    "failed": "the subject does something else than torch",
    "stale": "torch no longer does what a deviation or a limit says of it, or an expectation no longer holds",
    "expected": "the subject fails it, as its claims file says",
    "uncovered": "no test of this run asked: its tests are for a larger profile, or were not chosen",
    "not provided": "the subject has no such name, and does not claim it",
    "not claimed": "an extension, which torch cannot do and the subject does not claim",
    "unavailable": "it needs a device, a world size or a compiler that is not here",
    "reference cannot run here": "torch itself cannot do it here, and was seen to fail",
    "known": "the subject does as torch does, where impl deviates on purpose",
    "passed": "the subject does as torch does, or as the deviation says",
}


@dataclass(frozen=True)
class Axis:
    """One column: where and on what the tests ran; an empty part means that they draw it themselves or need none."""

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
    """Tests that are not red and say the same: one function with several parameters."""

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
        found: dict[tuple[str, str, str], list[str]] = {}
        for test in self.tests:
            if test["outcome"] not in RED:
                function, bracket, parameters = test["nodeid"].partition("[")
                same = found.setdefault((test["outcome"], function, test["reason"]), [])
                same += [bracket + parameters] if bracket else []
        return [Calm(*same, parameters) for same, parameters in found.items()]

    @property
    def outcome(self) -> str:
        return min((test["outcome"] for test in self.tests), key=SEVERITY.index)

    @property
    def sign(self) -> str:
        return SIGNS[self.outcome]


@dataclass
class Row:
    clause: dict[str, Any]
    cells: dict[Axis, Cell]

    @property
    def outcome(self) -> str:
        return min((cell.outcome for cell in self.cells.values()), key=SEVERITY.index, default="uncovered")

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
    def is_there(self) -> bool:
        """Whether the subject provides something of it, and this run asked."""
        return any(row.outcome not in ("not provided", "not claimed", "uncovered") for row in self.rows)

    @property
    def counts(self) -> list[tuple[str, int]]:
        """How many of its clauses have each outcome, the worst first."""
        return ranked(row.outcome for row in self.rows)


def ranked(outcomes: Iterable[str]) -> list[tuple[str, int]]:
    """Each outcome with its number, the worst first."""
    return sorted(Counter(outcomes).items(), key=lambda entry: SEVERITY.index(entry[0]))


def matrix(report: dict[str, Any]) -> list[Area]:
    """One table an area, with only the columns that its tests have: red areas first, those that are not there last."""
    by_clause: dict[str, list[dict[str, Any]]] = {}
    for test in report["tests"]:
        by_clause.setdefault(test["clause"], []).append(test)
    areas: dict[str, list[Row]] = {}
    for clause in report["clauses"]:
        row = Row(clause, _cells(by_clause.get(clause["id"], [])))
        areas.setdefault(clause["area"], []).append(row)
    found = [Area(name, _axes(rows), rows) for name, rows in sorted(areas.items())]
    return sorted(found, key=lambda area: (not area.is_red, not area.is_there))


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
