"""Measurement of one benchmark case without asv, with the values that asv would store."""

import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import asv_format, comparison
from benchmarks.timing import Effort, Paired, median_interval

Values = dict[str, dict[str, float]]  # keys: names of methods in asv


def measure(
    kind: Any, case: tuple[Any, ...], effort: Effort, subject: str, most_s: float = 3_600.0
) -> tuple[Values, Paired | None]:
    """Return the values that asv stores, and for a ratio its summary. An absolute timing ends after `most_s`."""
    if issubclass(kind, comparison.Ratio):
        paired = kind.measure(case, effort, subject)
        return dict(_tracked(kind, {case: paired}, *case)), paired
    if issubclass(kind, comparison.Absolute):
        return {names_of(kind)[0]: timing_stats(samples_of(kind, case, most_s), kind.number)}, None
    if hasattr(kind, "setup"):  # raises NotImplementedError
        kind().setup(*case)
    cache = (kind().setup_cache(),) if hasattr(kind, "setup_cache") else ()
    return dict(_tracked(kind, *cache, *case)), None


def names_of(kind: Any) -> list[str]:
    return [asv_format.name_of(kind, method) for method in asv_format.methods_of(kind)]


def _tracked(kind: Any, *arguments: Any) -> Iterator[tuple[str, dict[str, float]]]:
    for method in asv_format.methods_of(kind):
        yield asv_format.name_of(kind, method), {"result": getattr(kind(), method)(*arguments)}


def samples_of(kind: type[comparison.Absolute], case: tuple[Any, ...], most_s: float) -> list[float]:
    """Return the seconds of a call as asv measures them: several calls a sample, each after an untimed set-up."""
    benchmark = kind()
    fewest, most, budget_s = kind.repeat
    began = time.perf_counter()

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
        while time.perf_counter() - began < min(kind.warmup_time, most_s / 4):
            sample()
        samples: list[float] = []
        while len(samples) < most:
            samples.append(sample())
            spent_s = time.perf_counter() - began
            if (spent_s > budget_s and len(samples) >= fewest) or spent_s > most_s:
                break
        return samples
    finally:
        if collecting:
            gc.enable()


def timing_stats(samples: list[float], number: int) -> dict[str, float]:
    """Return asv's statistics of the samples of a timing. Each sample is the mean of `number` calls."""
    ordered = sorted(samples)
    low, high = median_interval(ordered, 0.99)
    first, _, third = (
        statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    )
    return {
        "result": statistics.median(ordered),
        "ci_99_a": low,
        "ci_99_b": high,
        "q_25": first,
        "q_75": third,
        "number": number,
        "repeat": len(ordered),
    }
