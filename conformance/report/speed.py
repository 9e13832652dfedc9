"""Speed ratios as the page shows them, with significance and positions on a fixed scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

# Words and the limit of `benchmarks.decision`, which only a checkout has; a test holds them to it.
REGRESSION, MISSING = "regression", "missing"
SURELY = 1.03
_ENDS = (0.25, 4.0)  # ends of the scale, equal on all pages
TICKS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class SpeedCase:
    """A row of a group. Positions are in percent of the scale's width."""

    row: dict[str, Any]
    name: str

    @property
    def mark(self) -> str:
        if self.row["outcome"] != "measured":
            return self.row["outcome"]
        return "faster" if is_faster(self.row) else "slower" if is_slower(self.row) else "even"

    @property
    def was(self) -> float | None:
        """The earlier ratio, if the case has become slower."""
        return self.row.get("was") if self.row.get("verdict") == REGRESSION else None

    @property
    def whisker(self) -> tuple[float, float]:
        return position(self.row["low"]), position(self.row["high"])

    @property
    def dot(self) -> float:
        return position(self.row["ratio"])

    @property
    def beyond(self) -> str:
        """The side on which the ratio is outside the scale, or an empty string."""
        low, high = _ENDS
        return "left" if self.row["ratio"] < low else "right" if self.row["ratio"] > high else ""


@dataclass(frozen=True)
class SpeedGroup:
    name: str
    parameters: list[str]
    cases: list[SpeedCase]


def is_faster(row: dict[str, Any]) -> bool:
    return row["high"] < 1 / SURELY


def is_slower(row: dict[str, Any]) -> bool:
    return row["low"] > SURELY


def position(ratio: float) -> float:
    """Return the position of a ratio in percent from the left end of the scale."""
    low, high = map(math.log, _ENDS)
    return round(100 * (math.log(min(max(ratio, _ENDS[0]), _ENDS[1])) - low) / (high - low), 2)


def groups(speed: dict[str, Any]) -> list[SpeedGroup]:
    """Return the cases by benchmark, in the order of the benchmarks."""
    rows = speed.get("rows", [])
    order = list(dict.fromkeys(row["benchmark"] for row in rows))
    ordered = sorted(rows, key=lambda row: order.index(row["benchmark"]))
    return [
        SpeedGroup(
            name,
            list(own[0]["case"]),
            [SpeedCase(row, ", ".join(map(str, row["case"].values()))) for row in own],
        )
        for name, own in ((name, list(rows)) for name, rows in groupby(ordered, lambda row: row["benchmark"]))
    ]


def elsewhere(speed: dict[str, Any]) -> list[str]:
    """Return the other machines whose ratios are shown for comparison."""
    return sorted({machine for row in speed.get("rows", []) for machine in row.get("elsewhere", {})})


def in_digits(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio >= 0.01 else f"{ratio:.1g}"


def time_of(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
