"""The points of the clock: what was measured at one commit on one machine, as it lies in `benchmarks/results`.

Needs nothing but Python, and git where commits are counted.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_HASH_LENGTH = 8  # of asv's file names
_RESULT, _PARAMS, _VERSION = 0, 1, 2  # positions in asv's rows
_WHOLE = (_PARAMS, _VERSION, 3, 4)  # these and the two times are of the row, the others have a value a case
_RATIO, _NOISE, _BYTES = "track_ratio_vs_torch", "track_noise", "track_bytes"


@dataclass(frozen=True)
class RatioPoint:
    value: float  # impl ÷ torch, lower is better
    noise: (
        float  # median deviation of the pairs' ratios, as a share; nan if unknown, 0 of what was counted once
    )


@dataclass(frozen=True)
class Point:
    file: Path
    machine: str
    commit: str
    date_ms: int  # of the commit
    traits: dict[str, str]  # the keys by which asv tells machines and versions apart
    ratios: dict[
        str, RatioPoint
    ]  # by the case's name, as `python -m benchmarks` has it; of bytes without the subject


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


def commits_since(commit: str, root: Path = RESULTS.parents[1]) -> int | None:
    """How many commits of the current branch touch impl after this one; None where git cannot tell."""
    command = ["git", "rev-list", "--count", "--first-parent", f"{commit}..HEAD", "--", "impl"]
    try:
        run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(run.stdout)


def subjects(root: Path = RESULTS.parents[1]) -> dict[str, str]:
    """What each commit's message begins with, by its id; empty where git cannot tell."""
    command = ["git", "log", "--all", "--format=%H %s"]
    try:
        run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(line.split(" ", 1) for line in run.stdout.splitlines())


def ratios_by_case(earlier: list[Point], most: int) -> dict[str, list[float]]:
    """The ratios of the newest points that have the case, `most` of them at most, the newest first."""
    found: dict[str, list[float]] = {}
    for point in reversed(earlier):
        for name, ratio in point.ratios.items():
            if len(of_case := found.setdefault(name, [])) < most:
                of_case.append(ratio.value)
    return found


def add(
    results: dict[str, Any], machine: dict[str, Any], commit: str, date_ms: int, folder: Path = RESULTS
) -> list[Path]:
    """Put what was measured at a commit where asv finds it; the files that were written.

    What an earlier run at the same commit measured, and this one did not, is kept.
    """
    own = folder / machine["machine"]
    own.mkdir(parents=True, exist_ok=True)
    file = own / f"{commit[:_HASH_LENGTH]}-{results['env_name']}.json"
    earlier = json.loads(file.read_text())["results"] if file.is_file() else {}
    whole = {"commit_hash": commit, "date": date_ms} | results
    rows = {name: _joined(earlier.get(name), row) for name, row in results["results"].items()}
    whole["results"] = dict(sorted((earlier | rows).items()))
    file.write_text(json.dumps(whole))
    # To the byte as asv writes it, which would else change it again.
    (own / "machine.json").write_text(json.dumps(machine, indent=4, sort_keys=True))
    return [file, own / "machine.json"]


def _joined(earlier: list[Any] | None, later: list[Any]) -> list[Any]:
    """The later row of a benchmark, with the earlier one's cases where it has none of its own."""
    if earlier is None or earlier[_PARAMS : _VERSION + 1] != later[_PARAMS : _VERSION + 1]:
        return later
    length = max(len(earlier), len(later))
    columns = zip(*(row + [None] * (length - len(row)) for row in (earlier, later)), strict=True)
    kept = [value is not None and math.isnan(value) for value in later[_RESULT] or []]
    return [
        [
            a if keep else b
            for a, b, keep in zip(_cells_of(old, kept), _cells_of(new, kept), kept, strict=True)
        ]
        if position not in _WHOLE and (old is not None or new is not None)
        else new
        for position, (old, new) in enumerate(columns)
    ]


def _cells_of(column: list[Any] | None, like: list[Any]) -> list[Any]:
    return [None] * len(like) if column is None else column


def _read(file: Path) -> Point:
    content = json.loads(file.read_text())
    values: dict[str, float] = {}
    noises: dict[str, float] = {}
    for benchmark, row in content["results"].items():
        _, kind, method = benchmark.rsplit(".", 2)
        found = {_RATIO: values, _NOISE: noises}.get(method)
        if found is not None:
            found |= {f"{kind}[{case}]": value for case, value in _cells(row)}
        elif method == _BYTES:
            ratios = {f"{kind}[{case}]": value for case, value in _of_subjects(dict(_cells(row)))}
            values |= ratios
            noises |= dict.fromkeys(ratios, 0.0)
    return Point(
        file=file,
        machine=file.parent.name,
        commit=content["commit_hash"],
        date_ms=content["date"],
        traits=content["params"],
        ratios={name: RatioPoint(value, noises.get(name, math.nan)) for name, value in values.items()},
    )


def _of_subjects(cells: dict[str, float]) -> Iterator[tuple[str, float]]:
    """impl's bytes ÷ torch's, by the case without its subject, which comes first."""
    for case, value in cells.items():
        subject, _, others = case.partition(", ")
        if subject == "impl" and cells.get(f"torch, {others}"):
            yield others, value / cells[f"torch, {others}"]


def _cells(row: list[Any]) -> list[tuple[str, float]]:
    """The cases that were measured, by their parameters; asv keeps these as Python writes them."""
    results, params = row[_RESULT] or [], row[_PARAMS]
    cases = (", ".join(word.strip("'\"") for word in case) for case in itertools.product(*params))
    return [
        (case, value)
        for case, value in zip(cases, results, strict=False)
        if value is not None and not math.isnan(value)
    ]
