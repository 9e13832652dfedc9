"""Recorded durations of tests, by which shards are balanced and the profile `smoke` chooses its tests.

    python -m conformance.judge.durations report/report.json    records the tests of a complete run on the CPU

`durations.json` has rows of a clause, a function of tests, the number of tests and their seconds: for the fastest
function of each core clause, and for functions that take long. Only proportions matter, so another machine needs no
other file.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from conformance.judge.clauses import HERE, all_clauses

FILE = HERE / "durations.json"
_HELD = ("passed", "known")
_UNKNOWN_S = 0.05  # mean of the tests that are not recorded
_OVERHEAD_S = 0.03  # setup and teardown of a test
_LONG_S = 2.0  # functions whose tests take longer together are recorded
# Limit for the tests of `smoke`, in seconds of one process.
SMOKE_S = 60.0


@dataclass(frozen=True)
class Duration:
    """The tests of one function that belong to one clause."""

    clause: str  # empty for tests without clause
    function: str  # node id without parameters
    tests: int
    seconds: float

    @property
    def each_s(self) -> float:
        return self.seconds / self.tests + _OVERHEAD_S


@functools.cache
def recorded() -> tuple[Duration, ...]:
    return tuple(Duration(*row) for row in json.loads(FILE.read_text()))


def record(report: Mapping[str, Any]) -> list[Duration]:
    """Return the rows of the file for a report. Only tests that hold are recorded.

    A clause that needs an accelerator also has a row if one of its tests ran on the CPU. A selftest rejects that row.
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    for test in report["tests"]:
        if test["outcome"] in _HELD:
            seconds.setdefault((test["clause"], function_of(test["nodeid"])), []).append(test["seconds"])
    rows = [Duration(*names, len(tests), round(sum(tests), 3)) for names, tests in sorted(seconds.items())]
    clauses = [
        clause for clause in all_clauses().values() if clause.level == "core" or clause.mark == "accelerator"
    ]
    fastest = _fastest(rows, {clause.id for clause in clauses})
    return [row for row in rows if row.seconds > _LONG_S or fastest.get(row.clause) is row]


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _fastest(rows: Iterable[Duration], clauses: Collection[str]) -> dict[str, Duration]:
    fastest: dict[str, Duration] = {}
    for row in rows:
        if row.clause in clauses and row.each_s < getattr(fastest.get(row.clause), "each_s", float("inf")):
            fastest[row.clause] = row
    return fastest


def smoke_functions(durations: Sequence[Duration], limit_s: float = SMOKE_S) -> dict[str, str]:
    """Return the function with the fastest tests of each core clause, as far as one test of each fits into the limit.

    The fastest come first. A clause without recorded tests has none.
    """
    core = {clause.id for clause in all_clauses().values() if clause.level == "core"}
    fastest = _fastest(durations, core)
    chosen: dict[str, str] = {}
    total_s = 0.0
    for row in sorted(fastest.values(), key=lambda row: (row.each_s, row.clause)):
        total_s += row.each_s
        if total_s <= limit_s:
            chosen[row.clause] = row.function
    return chosen


def first_tests(nodeids: Iterable[str]) -> list[str]:
    """Return the first test of each function that the profile `smoke` has. They run first in every profile."""
    functions = set(smoke_functions(recorded()).values())
    first: dict[str, str] = {}
    for nodeid in nodeids:
        if (function := function_of(nodeid)) in functions:
            first.setdefault(function, nodeid)
    return list(first.values())


def shard_of(nodeids: Sequence[str], count: int, durations: Sequence[Duration]) -> dict[str, int]:
    """Return the shard of each function of tests, from 1 to `count`, so that all shards take about as long.

    The longest function goes first, to the shard that is the shortest until then. The result depends only on the
    arguments, so every process and every shard has the same.
    """
    totals: dict[str, tuple[int, float]] = {}
    for row in durations:
        tests, seconds = totals.get(row.function, (0, 0.0))
        totals[row.function] = (tests + row.tests, seconds + row.seconds)
    seconds_of: dict[str, float] = {}
    for function in map(function_of, nodeids):
        tests, seconds = totals.get(function, (1, _UNKNOWN_S))
        seconds_of[function] = seconds_of.get(function, 0.0) + seconds / tests + _OVERHEAD_S
    loads = [0.0] * count
    shards: dict[str, int] = {}
    for function in sorted(seconds_of, key=lambda name: (-seconds_of[name], name)):
        shortest = loads.index(min(loads))
        loads[shortest] += seconds_of[function]
        shards[function] = shortest + 1
    return shards


def main(words: Sequence[str]) -> None:
    [file] = words
    rows = (json.dumps(astuple(row)) for row in record(json.loads(Path(file).read_text())))
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
