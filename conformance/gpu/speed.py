"""Every benchmark that asv would run, run here without it: what tells most first, as much as the time allows."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import asv_format, catalogue, comparison
from benchmarks.common import LEFT_OUT_OF_QUICK
from benchmarks.timing import FULL, Paired, median_interval
from conformance.gpu.files import BENCHMARKS
from conformance.gpu.rows import Rows, Task, in_words, serve

_LEAST_CASE_S = 0.3
# What starts Python again and again keeps no pace that it is told: it comes last, if so much is left.
_OWN_PACE_S = 60.0
_OWN_PACE = "bench_import"
# A case may take some times its even share of what is left: most are faster than theirs.
_TIMES_ITS_SHARE = 3.0


@dataclass(frozen=True)
class Case:
    kind: Any
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        return catalogue.name_of(self.kind, self.values)

    @property
    def device(self) -> str:
        """Those that name none are the CPU's."""
        return dict(zip(self.kind.param_names, self.values, strict=True)).get("device", "cpu")

    @property
    def is_headline(self) -> bool:
        return not LEFT_OUT_OF_QUICK.intersection(self.values)

    @property
    def is_ratio(self) -> bool:
        return issubclass(self.kind, comparison.Ratio)

    @property
    def least_s(self) -> float:
        """Not to be begun with less."""
        return _OWN_PACE_S if self.kind.__module__.endswith(_OWN_PACE) else _LEAST_CASE_S

    def order(self, device: str) -> tuple[Any, ...]:
        """What tells most first, and of that what works on the same tensors together."""
        inputs = catalogue.by_inputs((self.kind, self.values))
        return self.least_s, not self.is_headline, self.device != device, not self.is_ratio, *inputs


def cases(device: str) -> list[Case]:
    """All that this host can run, in the order of what they tell."""
    devices = {"cpu", device}
    found = [
        Case(kind, values) for kind in catalogue.load_all() for values in itertools.product(*kind.params)
    ]
    found = [case for case in found if case.device in devices]
    return sorted(found, key=lambda case: case.order(device))


def work(task: Task, rows: Rows) -> None:
    catalogue.describe_in(Path(task.rows).with_name(BENCHMARKS))
    todo = cases(task.device)
    rows.plan(case.name for case in todo)
    for position, case in enumerate(todo):
        if rows.left_s < case.least_s:
            return
        share_s = rows.left_s / (len(todo) - position)
        most_s = min(max(share_s * _TIMES_ITS_SHARE, _LEAST_CASE_S), rows.left_s)
        _run(case, most_s, task.subject, rows)


def _run(case: Case, most_s: float, subject: str, rows: Rows) -> None:
    about = {
        "benchmark": case.kind.__name__,
        "case": dict(zip(case.kind.param_names, map(repr, case.values), strict=True)),
    }
    try:
        found, more = _measured(case, most_s, subject)
    except NotImplementedError as missing:
        rows.write(case.name, "not available", says=str(missing), **about)
    except Exception as error:  # the others are still worth measuring
        rows.add(case.name, "failed", in_words(error), values=dict.fromkeys(_names(case)), **about)
    else:
        rows.write(case.name, "measured", values=found, **about, **more)
        if case.is_ratio:
            rows.tell(f"{case.name}: {more['ratio']:.3f} × torch ({more['low']:.3f} to {more['high']:.3f})")


def _names(case: Case) -> list[str]:
    return [asv_format.name_of(case.kind, method) for method in asv_format.methods_of(case.kind)]


def _measured(case: Case, most_s: float, subject: str) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """What asv keeps of each method, and what a report says beside."""
    kind, values = case.kind, case.values
    if case.is_ratio:
        effort = replace(FULL, budget_s=min(FULL.budget_s, most_s / 3))  # it may take three times that
        paired: Paired = kind.measure(values, effort, subject)
        return dict(_tracked(case, {values: paired})), vars(paired)
    if issubclass(kind, comparison.Absolute):
        samples = samples_of(kind, values, most_s)
        return {_names(case)[0]: timing_stats(samples, kind.number)}, {}
    return dict(_tracked(case, kind().setup_cache())), {}


def _tracked(case: Case, cache: Any) -> Iterator[tuple[str, dict[str, float]]]:
    for name in _names(case):
        method = getattr(case.kind(), name.rpartition(".")[2])
        yield name, {"result": method(cache, *case.values)}


def samples_of(kind: type[comparison.Absolute], case: tuple[Any, ...], most_s: float) -> list[float]:
    """Seconds of a call as asv takes them: put back before each call, which is not timed, and some calls a sample."""
    benchmark = kind()
    fewest, most, budget_s = kind.repeat
    begun = time.perf_counter()

    def sample() -> float:
        spent_s = 0.0
        for _ in range(kind.number):
            benchmark.setup(*case)
            start = time.perf_counter()
            benchmark.time_call(*case)
            spent_s += time.perf_counter() - start
        return spent_s / kind.number

    collecting = gc.isenabled()
    gc.disable()
    try:
        sample()
        while time.perf_counter() - begun < min(kind.warmup_time, most_s / 4):
            sample()
        samples: list[float] = []
        while len(samples) < most:
            samples.append(sample())
            spent_s = time.perf_counter() - begun
            if (spent_s > budget_s and len(samples) >= fewest) or spent_s > most_s:
                break
        return samples
    finally:
        if collecting:
            gc.enable()


def timing_stats(samples: list[float], number: int) -> dict[str, float]:
    """What asv keeps of the samples of a timing, each the mean of `number` calls."""
    ordered = sorted(samples)
    low, high = median_interval(ordered, 0.99)
    first, _, third = (
        statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    )
    found = {"ci_99_a": low, "ci_99_b": high, "q_25": first, "q_75": third}
    return {"result": statistics.median(ordered), **found, "number": number, "repeat": len(ordered)}


if __name__ == "__main__":
    serve(work)
