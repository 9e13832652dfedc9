"""Predictions for an H100, earlier measurements on one, and how a measurement compares with them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("predictions.toml")


@dataclass(frozen=True)
class Prediction:
    phase: str
    row: str
    says: str  # measured quantity
    value: str | Sequence[str]  # a key, or several whose values are added
    expected: Sequence[float]  # the lowest and the highest value
    commit: str = ""  # commit of a measured `expected`; empty: a prediction
    over: str = ""
    at_most: float | None = None  # the goal, or `at_least`
    at_least: float | None = None
    scale: float = 1.0
    unit: str = ""

    def measured(self, rows: Sequence[Mapping[str, Any]]) -> float | None:
        """Return the value in the rows of the phase, or None if the row or its value is missing."""
        row = next((row for row in rows if row["name"] == self.row), {})
        parts = [_value(row, key) for key in ([self.value] if isinstance(self.value, str) else self.value)]
        known = [part for part in parts if part is not None]
        divisor = _value(row, self.over) if self.over else 1.0
        return sum(known) * self.scale / divisor if len(known) == len(parts) and divisor else None

    def verdict(self, measured: float) -> str:
        """Return how a measurement compares with the goal and the prediction."""
        low, high = self.expected
        words = ["as expected" if low <= measured <= high else "higher" if measured > high else "lower"]
        if self.goal:
            is_over = self.at_most is not None and measured > self.at_most
            is_under = self.at_least is not None and measured < self.at_least
            words.insert(0, "GOAL MISSED" if is_over or is_under else "goal met")
        return ", ".join(words)

    @property
    def goal(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "" if self.at_least is None else f"≥ {self.at_least:g}"


def load() -> list[Prediction]:
    with FILE.open("rb") as file:
        groups = tomllib.load(file)["group"]
    return [
        Prediction(row=row, **group, **entry) for group in groups for row, entry in group.pop("rows").items()
    ]


def _value(row: Mapping[str, Any], path: str) -> float | None:
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None
