"""The points of the clock: what was measured at one commit on one machine, as it lies in `benchmarks/results`.

Needs nothing but Python.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_RATIO, _NOISE = "track_ratio_vs_torch", "track_noise"


@dataclass(frozen=True)
class Ratio:
    value: float  # impl ÷ torch, lower is better
    noise: float  # median deviation of the pairs' ratios, as a share; nan if unknown


@dataclass(frozen=True)
class Point:
    file: Path
    machine: str
    commit: str
    date_ms: int  # of the commit
    traits: dict[str, str]  # the keys by which asv tells machines and versions apart
    ratios: dict[str, Ratio]  # by the case's name, as `python -m benchmarks` has it


def points(results: Path = RESULTS) -> list[Point]:
    """All of them, the oldest commit first."""
    files = (file for file in results.glob("*/*.json") if file.name != "machine.json")
    return sorted(map(_read, files), key=lambda point: (point.date_ms, point.commit))


def of_machine(machine: str, torch: str, results: Path = RESULTS) -> list[Point]:
    """Those that can be compared with what is measured here and now."""
    return [
        point
        for point in points(results)
        if point.machine == machine and point.traits.get("torch", "").split("+")[0] == torch
    ]


def ratios_by_case(earlier: list[Point], most: int) -> dict[str, list[float]]:
    """The ratios of the newest points that have the case, `most` of them at most, the newest first."""
    found: dict[str, list[float]] = {}
    for point in reversed(earlier):
        for name, ratio in point.ratios.items():
            if len(of_case := found.setdefault(name, [])) < most:
                of_case.append(ratio.value)
    return found


def _read(file: Path) -> Point:
    content = json.loads(file.read_text())
    values: dict[str, float] = {}
    noises: dict[str, float] = {}
    for benchmark, row in content["results"].items():
        _, kind, method = benchmark.rsplit(".", 2)
        found = {_RATIO: values, _NOISE: noises}.get(method)
        if found is not None:
            found |= {f"{kind}[{case}]": value for case, value in _cells(row)}
    return Point(
        file=file,
        machine=file.parent.name,
        commit=content["commit_hash"],
        date_ms=content["date"],
        traits=content["params"],
        ratios={name: Ratio(value, noises.get(name, math.nan)) for name, value in values.items()},
    )


def _cells(row: list[Any]) -> list[tuple[str, float]]:
    """The cases that were measured, by their parameters; asv keeps these as Python writes them."""
    results, params = row[0] or [], row[1]
    cases = (", ".join(word.strip("'\"") for word in case) for case in itertools.product(*params))
    return [
        (case, value)
        for case, value in zip(cases, results, strict=False)
        if value is not None and not math.isnan(value)
    ]
