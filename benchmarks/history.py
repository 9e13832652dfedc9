"""Recorded results in `benchmarks/results`. A point holds the measurements of one commit on one machine.

This module needs only Python, and git to count commits.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_HASH_LENGTH = 8  # hash length of asv's file names
_RESULT, _PARAMS, _VERSION = 0, 1, 2  # positions in asv's rows
# Columns with one value per row, the two times among them. The other columns have one value per case.
_ROW_COLUMNS = (_PARAMS, _VERSION, 3, 4)
_BYTES = "track_bytes"
# Attributes of a ratio by the method that tracks them.
_ATTRIBUTES = {
    "track_ratio_vs_torch": "value",
    "track_noise": "noise",
    "track_share_of_copy": "share_of_copy",
    "track_seconds": "of_impl",
    "track_seconds_of_torch": "of_torch",
}


@dataclass(frozen=True)
class RatioPoint:
    value: float  # impl ÷ torch, lower is better
    # Median deviation of the pairs' ratios as a share of the ratio. It is nan if unknown, and 0 for counted bytes.
    noise: float
    # Bandwidth ÷ that of a plain copy. None if memory does not limit the case.
    share_of_copy: float | None = None
    # Seconds of a call, or counted bytes. None in old results.
    of_impl: float | None = None
    of_torch: float | None = None
    unit: str = "time"  # "time" or "bytes"
    version: str = "1"  # version of the benchmark


@dataclass(frozen=True)
class Point:
    file: Path
    machine: str
    commit: str
    date_ms: int  # author date of the commit
    traits: dict[str, str]  # asv's keys of the machine and versions
    # Ratios by the case's name in `python -m benchmarks`. The names of byte counts leave out the subject.
    ratios: dict[str, RatioPoint]


def points(results: Path = RESULTS) -> list[Point]:
    """Return all recorded points, oldest commit first."""
    files = (file for file in results.glob("*/*.json") if file.name != "machine.json")
    return sorted(map(_read, files), key=lambda point: (point.date_ms, point.commit))


def of_machine(machine: str, torch: str, results: Path = RESULTS) -> list[Point]:
    """Return the points of a machine with this release of torch, oldest first."""
    return [
        point
        for point in points(results)
        if point.machine == machine and point.traits.get("torch", "").split("+")[0] == torch
    ]


def commits_since(commit: str, root: Path = RESULTS.parents[1]) -> int | None:
    """Return how many commits of the current branch change impl after `commit`, or None if git cannot count them."""
    count = _git(root, "rev-list", "--count", "--first-parent", f"{commit}..HEAD", "--", "impl")
    return None if count is None else int(count)


def subjects(*revisions: str, root: Path = RESULTS.parents[1]) -> dict[str, str]:
    """Return the subject of each commit by its id, or an empty dict without git.

    Args:
        revisions: arguments of `git log` that select the commits (default: all commits).
    """
    run = _git(root, "log", "--format=%H %s", *(revisions or ("--all",)))
    return dict(line.split(" ", 1) for line in run.splitlines()) if run else {}


@functools.cache
def has_impl_changed(before: str, after: str, root: Path = RESULTS.parents[1]) -> bool:
    """Return whether impl differs between two commits. Unless git shows it, different commits differ."""
    if before == after:
        return False
    differing = _git(root, "diff", "--name-only", before, after, "--", "impl")
    return differing is None or bool(differing)


def release_date_ms(root: Path = RESULTS.parents[1]) -> int | None:
    """Return the author date of the last release, which a tag such as v0.1.0 names, or None if there is none."""
    tag = _git(root, "describe", "--tags", "--abbrev=0", "--match=v[0-9]*")
    date = tag and _git(root, "log", "-1", "--format=%at", tag.strip())
    return int(date) * 1000 if date else None


def _git(root: Path, *words: str) -> str | None:
    """Return the output of git, or None if it fails or is missing."""
    try:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def ratios_by_case(earlier: list[Point], most: int) -> dict[str, list[float]]:
    """Return up to `most` ratios of each case, newest first."""
    ratios: dict[str, list[float]] = {}
    for point in reversed(earlier):
        for name, ratio in point.ratios.items():
            if len(of_case := ratios.setdefault(name, [])) < most:
                of_case.append(ratio.value)
    return ratios


def add(
    results: dict[str, Any], machine: dict[str, Any], commit: str, date_ms: int, folder: Path = RESULTS
) -> list[Path]:
    """Store the results of a commit where asv finds them. Return the written files.

    Cases that only an earlier run at the same commit measured are kept.
    """
    own = folder / machine["machine"]
    own.mkdir(parents=True, exist_ok=True)
    file = own / f"{commit[:_HASH_LENGTH]}-{results['env_name']}.json"
    earlier = json.loads(file.read_text())["results"] if file.is_file() else {}
    content = {"commit_hash": commit, "date": date_ms} | results
    rows = {name: _merge_rows(earlier.get(name), row) for name, row in results["results"].items()}
    content["results"] = dict(sorted((earlier | rows).items()))
    file.write_text(json.dumps(content))
    # The same bytes as asv writes, so that asv does not change the file again.
    (own / "machine.json").write_text(json.dumps(machine, indent=4, sort_keys=True))
    return [file, own / "machine.json"]


def _merge_rows(earlier: list[Any] | None, later: list[Any]) -> list[Any]:
    """Return the later row of a benchmark, with the cases that it lacks taken from the earlier row."""
    if earlier is None or earlier[_PARAMS : _VERSION + 1] != later[_PARAMS : _VERSION + 1]:
        return later
    length = max(len(earlier), len(later))
    columns = zip(*(row + [None] * (length - len(row)) for row in (earlier, later)), strict=True)
    is_missing = [value is not None and math.isnan(value) for value in later[_RESULT] or []]
    return [
        [
            old_cell if missing else new_cell
            for old_cell, new_cell, missing in zip(
                _cells_of(old, is_missing), _cells_of(new, is_missing), is_missing, strict=True
            )
        ]
        if position not in _ROW_COLUMNS and (old is not None or new is not None)
        else new
        for position, (old, new) in enumerate(columns)
    ]


def _cells_of(column: list[Any] | None, like: list[Any]) -> list[Any]:
    return [None] * len(like) if column is None else column


def _read(file: Path) -> Point:
    return point_of(json.loads(file.read_text()), file)


def point_of(content: dict[str, Any], file: Path) -> Point:
    """Return the point of a results file with this content."""
    attributes: dict[str, dict[str, Any]] = {}
    ratios: dict[str, RatioPoint] = {}
    for benchmark, row in content["results"].items():
        _, kind, method = benchmark.rsplit(".", 2)
        if method in _ATTRIBUTES:
            for case, value in _cells(row):
                of_case = attributes.setdefault(f"{kind}[{case}]", {"noise": math.nan})
                of_case |= {_ATTRIBUTES[method]: value, "version": row[_VERSION]}
        elif method == _BYTES:
            for case, of_impl, of_torch in _of_subjects(dict(_cells(row))):
                ratios[f"{kind}[{case}]"] = RatioPoint(
                    of_impl / of_torch, 0.0, None, of_impl, of_torch, "bytes", row[_VERSION]
                )
    ratios |= {name: RatioPoint(**of_case) for name, of_case in attributes.items() if "value" in of_case}
    return Point(file, file.parent.name, content["commit_hash"], content["date"], content["params"], ratios)


def _of_subjects(cells: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yield each case without the subject at its front, and the bytes of impl and of torch."""
    for case, value in cells.items():
        subject, _, others = case.partition(", ")
        if subject == "impl" and cells.get(f"torch, {others}"):
            yield others, value, cells[f"torch, {others}"]


def _cells(row: list[Any]) -> list[tuple[str, float]]:
    """Return the measured cases with their values. asv stores the parameters of a case as their reprs."""
    results, params = row[_RESULT] or [], row[_PARAMS]
    cases = (", ".join(word.strip("'\"") for word in case) for case in itertools.product(*params))
    return [
        (case, value)
        for case, value in zip(cases, results, strict=False)
        if value is not None and not math.isnan(value)
    ]
