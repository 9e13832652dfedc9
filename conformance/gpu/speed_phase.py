"""The benchmarks of one device, run without asv: headline ratios first, as many as the time allows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import catalogue, comparison, single
from benchmarks.common import LEFT_OUT_OF_QUICK, is_included
from benchmarks.timing import FULL
from conformance.gpu.phase_rows import BENCHMARKS, PhaseTask, Rows, in_words, serve

_LEAST_CASE_S = 0.3
# These start processes or compile, which takes long. They run last, if this much time is left.
_OWN_PACE_S = 60.0
_OWN_PACE = ("bench_import", "bench_judge", "bench_optimizer_compile", "RatioCapturedAgainstCompiled")
# The ratios that the README and docs/benchmarks.md show. They run first, and of their cases float32 first.
_FIRST = (
    "RatioFusedAmpStep",
    "RatioAmpStep",
    "RatioClipGradNorm",
    "RatioUnscale",
    "RatioCapturedStep",
    "RatioTotalNorm",
)
# A case may take a multiple of its even share of the time, because most cases are faster.
_TIMES_ITS_SHARE = 3.0


@dataclass(frozen=True)
class BenchmarkCase:
    kind: Any
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        return catalogue.name_of(self.kind, self.values)

    @property
    def device(self) -> str:
        """The device of the case. A case that names none runs on the CPU."""
        return dict(zip(self.kind.param_names, self.values, strict=True)).get("device", "cpu")

    @property
    def is_headline(self) -> bool:
        return is_included(dict(zip(self.kind.param_names, self.values, strict=True)), LEFT_OUT_OF_QUICK)

    @property
    def is_ratio(self) -> bool:
        return issubclass(self.kind, comparison.Ratio)

    @property
    def least_s(self) -> float:
        """Time that must be left when it begins."""
        names = {self.kind.__module__.rpartition(".")[2], self.kind.__name__}
        return _LEAST_CASE_S if names.isdisjoint(_OWN_PACE) else _OWN_PACE_S

    @property
    def order(self) -> tuple[Any, ...]:
        """A key that sorts headline ratios first, those of _FIRST before the others.

        Apart from that, cases on the same tensors follow one another.
        """
        shapes, dtype = inputs = catalogue.by_inputs((self.kind, self.values))
        is_first = self.is_headline and self.kind.__name__ in _FIRST
        of_first = (dtype != "float32", shapes, _FIRST.index(self.kind.__name__)) if is_first else ()
        return self.least_s, not self.is_headline, not self.is_ratio, not is_first, of_first, *inputs


def cases(device: str) -> list[BenchmarkCase]:
    """Return the cases of `device`, most informative first."""
    all_cases = [
        BenchmarkCase(kind, values)
        for kind in catalogue.load_all()
        for values in itertools.product(*kind.params)
    ]
    return sorted((case for case in all_cases if case.device == device), key=lambda case: case.order)


def work(task: PhaseTask, rows: Rows) -> None:
    catalogue.describe_in(Path(task.rows).with_name(BENCHMARKS))
    todo = cases(task.device)
    rows.plan(case.name for case in todo)
    for position, case in enumerate(todo):
        if rows.left_s < case.least_s:
            return
        share_s = rows.left_s / (len(todo) - position)
        most_s = min(max(share_s * _TIMES_ITS_SHARE, _LEAST_CASE_S), rows.left_s)
        _run(case, most_s, task.subject, rows)


def _run(case: BenchmarkCase, most_s: float, subject: str, rows: Rows) -> None:
    about = {
        "benchmark": case.kind.__name__,
        "case": dict(zip(case.kind.param_names, map(repr, case.values), strict=True)),
    }
    try:
        measured, more = _measured(case, most_s, subject)
    except NotImplementedError as missing:
        rows.write(case.name, "not available", says=str(missing), **about)
    except Exception as error:  # the others are still worth measuring
        rows.add(
            case.name, "failed", in_words(error), values=dict.fromkeys(single.names_of(case.kind)), **about
        )
    else:
        rows.write(case.name, "measured", values=measured, **about, **more)
        if case.is_ratio:
            rows.tell(f"{case.name}: {more['ratio']:.3f} × torch ({more['low']:.3f} to {more['high']:.3f})")


def _measured(case: BenchmarkCase, most_s: float, subject: str) -> tuple[single.Values, dict[str, Any]]:
    """Return asv's values of each method, and additional values for the report."""
    # A measurement may take three times its budget.
    effort = replace(FULL, budget_s=min(FULL.budget_s, most_s / 3))
    values, paired = single.measure(case.kind, case.values, effort, subject, most_s)
    return values, vars(paired) if paired else {}


if __name__ == "__main__":
    serve(work)
