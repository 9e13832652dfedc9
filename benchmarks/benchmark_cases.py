"""Every benchmark there is, and the measurement of one case, for the programs that run them without asv.

`python -m benchmarks.benchmark_cases FILE` writes asv's description of them.
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
from benchmarks.common import LeftOut, tells_most
from benchmarks.timing import Effort


def load_all() -> list[Any]:
    """The classes that asv would run: ratios, absolute times, and those that measure in their own way."""
    found: list[Any] = []
    for file in pkgutil.iter_modules(benchmarks.__path__, "benchmarks."):
        if file.name.startswith("benchmarks.bench_"):
            module = importlib.import_module(file.name)
            own = [value for value in vars(module).values() if getattr(value, "__module__", "") == file.name]
            found += [value for value in own if inspect.isclass(value) and asv_format.methods_of(value)]
    return found


def describe_in(file: Path) -> None:
    """Write what asv has in its benchmarks.json."""
    file.write_text(json.dumps(asv_format.described(load_all()), indent=1))


def name_of(kind: Any, case: tuple[Any, ...]) -> str:
    return f"{kind.__name__}[{', '.join(map(str, case))}]"


def by_inputs(kind_and_case: tuple[Any, tuple[Any, ...]]) -> tuple[str, str]:
    """Cases that agree in this work on the same tensors, which are made once if the cases follow one another."""
    kind, case = kind_and_case
    given = dict(zip(kind.param_names, case, strict=True))
    return given.get("shapes", ""), given.get("dtype", "float32")


def cases(kind: Any, left_out: LeftOut) -> list[tuple[Any, ...]]:
    """Those that have none of the values that are left out."""
    found = itertools.product(*kind.params)
    return [case for case in found if tells_most(dict(zip(kind.param_names, case, strict=True)), left_out)]


def is_tracked(kind: Any) -> bool:
    """Whether its course over commits is drawn, as all ratios' and that of memory are."""
    return hasattr(kind, "area")


def device_of(kind: Any, case: tuple[Any, ...]) -> str:
    """Those that name none are the CPU's."""
    return dict(zip(kind.param_names, case, strict=True)).get("device", "cpu")


def measured(
    kind: Any, case: tuple[Any, ...], effort: Effort, subject: str
) -> tuple[dict[str, Any], single.Values | None]:
    """A row of a report, with the ratio and its interval if it is one, and what asv keeps; or why there is nothing."""
    row: dict[str, Any] = {
        "benchmark": kind.__name__,
        "case": dict(zip(kind.param_names, case, strict=True)),
        "name": name_of(kind, case),
    }
    if getattr(kind, "is_one_off", False):
        row["is_one_off"] = True
    try:
        values, paired = single.measured(kind, case, effort, subject)
    except NotImplementedError as missing:
        return row | {"outcome": "not available", "why": str(missing)}, None
    except Exception as error:  # the others are still worth measuring
        return row | {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}, None
    return row | {"outcome": "measured", **(dataclasses.asdict(paired) if paired else {})}, values


def keep(
    kept: asv_format.Measured, kind: Any, case: tuple[Any, ...], outcome: str, values: single.Values | None
) -> None:
    """Add a case to what asv keeps; what is not available is left out."""
    if outcome == "not available":
        return
    for name in single.names_of(kind):
        kept.setdefault(name, {})[tuple(map(repr, case))] = values[name] if values else None


if __name__ == "__main__":
    describe_in(Path(sys.argv[1]))
