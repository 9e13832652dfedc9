"""Writer of asv's files in plain Python, so that a machine without asv can contribute to the dashboard.

A benchmark is a method `time_*` or `track_*` of a class in a `bench_*` module, as asv defines it. There are two files:
the description of the benchmarks (`benchmarks.json`), and their results at one commit on one machine.
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
NOT_MEASURED = math.nan  # asv's n/a; None is its "failed"
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


def describe_benchmarks(kinds: Iterable[Any]) -> dict[str, Any]:
    """Return the content of benchmarks.json."""
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
    """Return the content of a results file without its commit, which `history.add` adds.

    Args:
        described: the content of benchmarks.json.
        measured: results by benchmark name and case (the reprs of its parameters). A result has the key `result` and,
            for a timing, `ci_99_a`, `ci_99_b`, `q_25`, `q_75`, `number` and `repeat`. None means "failed" to asv, and a
            missing case means n/a.
        versions: the versions of `python` and `torch`.
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
    values = [cases.get(case, {"result": NOT_MEASURED}) for case in itertools.product(*described["params"])]
    row: list[Any] = [
        [value and value["result"] for value in values],
        described["params"],
        described["version"],
    ]
    row.append(started_at_ms)
    # The total duration: asv shows it only while it runs the benchmarks.
    row.append(None)
    for column in _STATS:
        cells = [value and value.get(column.removeprefix("stats_")) for value in values]
        row.append(None if all(cell is None for cell in cells) else cells)
    while row[-1] is None:
        row.pop()
    return row
