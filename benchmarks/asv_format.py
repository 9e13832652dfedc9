"""asv's files, written by Python alone: on a machine that has no asv, what was measured can still join its dashboard.

A benchmark here is a method `time_*` or `track_*` of a class in a `bench_*` module, as for asv. Two files: what the
benchmarks are (`benchmarks.json`) and what they gave at one commit on one machine.
"""

import inspect
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

VERSION_OF_BENCHMARKS = 2
VERSION_OF_RESULTS = 2
VERSION_OF_MACHINE = 1
NOT_MEASURED = math.nan  # asv's n/a; None would be its "failed"
_COLUMNS = (
    "result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b", "stats_q_25",
    "stats_q_75", "stats_number", "stats_repeat", "samples", "profile",
)  # fmt: skip
_STATS = [column for column in _COLUMNS if column.startswith("stats_")]
Measured = dict[str, dict[tuple[str, ...], dict[str, float] | None]]
_METHOD = re.compile(r"(time|track)_")


def methods_of(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if _METHOD.match(name)]


def name_of(kind: type, method: str) -> str:
    return f"{kind.__module__.removeprefix('benchmarks.')}.{kind.__name__}.{method}"


def described(kinds: Iterable[Any]) -> dict[str, Any]:
    """The content of benchmarks.json."""
    described: dict[str, Any] = {"version": VERSION_OF_BENCHMARKS}
    for kind in kinds:
        for method in methods_of(kind):
            described[name_of(kind, method)] = _description(kind, method)
    return described


def _description(kind: Any, method: str) -> dict[str, Any]:
    function = getattr(kind, method)
    is_timed = method.startswith("time_")
    return {
        "code": inspect.getsource(function),
        "name": name_of(kind, method),
        "param_names": list(kind.param_names),
        "pretty_name": getattr(function, "pretty_name", None),
        "params": [[repr(value) for value in values] for values in kind.params],
        "type": "time" if is_timed else getattr(function, "type", "track"),
        "unit": "seconds" if is_timed else getattr(function, "unit", "unit"),
        "version": kind.version,
    }


def results(
    described: Mapping[str, Any],
    measured: Measured,
    machine: Mapping[str, str],
    versions: Mapping[str, str],
    started_at_ms: int,
) -> dict[str, Any]:
    """The content of a results file but for its commit, which whoever adds it to the results must know.

    Args:
        described: the content of benchmarks.json.
        measured: by a benchmark's name and its case (the parameters' reprs) the `result` and, for a timing,
            `ci_99_a`, `ci_99_b`, `q_25`, `q_75`, `number`, `repeat`; None is asv's "failed", a missing case its n/a.
        versions: of `python` and `torch`.
    """
    rows: dict[str, list[Any]] = {}
    for name, cases in measured.items():
        rows[name] = _row(described[name], cases, started_at_ms)
    python = versions["python"]
    return {
        "env_name": f"existing-py{python}-torch{versions['torch']}",
        "params": {**machine, "python": python, "torch": versions["torch"]},
        "python": python,
        "requirements": {"torch": versions["torch"]},
        "env_vars": {},
        "result_columns": list(_COLUMNS),
        "results": rows,
        "durations": {},
        "version": VERSION_OF_RESULTS,
    }


def _row(
    described: Mapping[str, Any],
    cases: Mapping[tuple[str, ...], Mapping[str, float] | None],
    started_at_ms: int,
) -> list[Any]:
    found = [cases.get(case, {"result": NOT_MEASURED}) for case in itertools.product(*described["params"])]
    row: list[Any] = [[case and case["result"] for case in found], described["params"], described["version"]]
    row.append(started_at_ms)
    row.append(None)  # how long it took as a whole, which asv only shows while it runs
    for column in _STATS:
        values = [case and case.get(column.removeprefix("stats_")) for case in found]
        row.append(None if all(value is None for value in values) else values)
    while row[-1] is None:
        row.pop()
    return row
