"""List of all benchmarks, and the measurement of one case, for programs that run them without asv.

`python -m benchmarks.catalogue FILE` writes asv's description of the benchmarks.
"""

import dataclasses
import importlib
import inspect
import itertools
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks import asv_format, single
from benchmarks.common import LeftOut, is_included
from benchmarks.timing import Effort


def load_all() -> list[Any]:
    """Return the benchmark classes that asv runs: ratios, absolute times, and classes with their own measurement."""
    kinds: list[Any] = []
    for file in pkgutil.iter_modules(benchmarks.__path__, "benchmarks."):
        if file.name.startswith("benchmarks.bench_"):
            module = importlib.import_module(file.name)
            own = [value for value in vars(module).values() if getattr(value, "__module__", "") == file.name]
            kinds += [value for value in own if inspect.isclass(value) and asv_format.methods_of(value)]
    return kinds


def describe_in(file: Path) -> None:
    """Write asv's benchmarks.json to `file`."""
    file.write_text(json.dumps(asv_format.describe_benchmarks(load_all()), indent=1))


def name_of(kind: Any, case: tuple[Any, ...]) -> str:
    return f"{kind.__name__}[{', '.join(map(str, case))}]"


def by_inputs(kind_and_case: tuple[Any, tuple[Any, ...]]) -> tuple[str, str]:
    """Return a sort key that puts cases with the same tensors next to each other, so that these are created once."""
    kind, case = kind_and_case
    values = dict(zip(kind.param_names, case, strict=True))
    return values.get("shapes", ""), values.get("dtype", "float32")


def cases(kind: Any, left_out: LeftOut) -> list[tuple[Any, ...]]:
    """Return the cases of a benchmark without the values in `left_out`."""
    every = itertools.product(*kind.params)
    return [case for case in every if is_included(dict(zip(kind.param_names, case, strict=True)), left_out)]


def is_tracked(kind: Any) -> bool:
    """Return whether the dashboard draws the benchmark over commits. It draws all ratios, memory and traffic."""
    return hasattr(kind, "area")


def device_of(kind: Any, case: tuple[Any, ...]) -> str:
    """Return the device of a case, 'cpu' if the benchmark has no such parameter."""
    return dict(zip(kind.param_names, case, strict=True)).get("device", "cpu")


def measure_case(
    kind: Any, case: tuple[Any, ...], effort: Effort, subject: str
) -> tuple[dict[str, Any], single.Values | None]:
    """Return the report row of a case and the values that asv stores.

    The row has the ratio with its interval, or the reason why the case was not measured. The values are None then.
    """
    row: dict[str, Any] = {
        "benchmark": kind.__name__,
        "case": dict(zip(kind.param_names, case, strict=True)),
        "name": name_of(kind, case),
    }
    if getattr(kind, "is_one_off", False):
        row["is_one_off"] = True
    try:
        values, paired = single.measure(kind, case, effort, subject)
    except NotImplementedError as missing:
        return row | {"outcome": "not available", "why": str(missing)}, None
    except Exception as error:
        return row | {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}, None
    if hasattr(kind, "track_bytes"):
        row["bytes"] = values[asv_format.name_of(kind, "track_bytes")]["result"]
    return row | {"outcome": "measured", **(dataclasses.asdict(paired) if paired else {})}, values


def add_to(
    measured: asv_format.Measured,
    kind: Any,
    case: tuple[Any, ...],
    outcome: str,
    values: single.Values | None,
) -> None:
    """Add a case to the values that asv stores. A case that is not available is left out."""
    if outcome == "not available":
        return
    for name in single.names_of(kind):
        measured.setdefault(name, {})[tuple(map(repr, case))] = values[name] if values else None


if __name__ == "__main__":
    describe_in(Path(sys.argv[1]))
