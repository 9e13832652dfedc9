"""Paired timing: two workloads timed alternately in one process, for their ratio.

On a shared machine the absolute time of the same code drifts by tens of per cent within a minute. Neighbouring chunks
drift together, so their ratio is stable. Many short chunks are better than few long ones: for a true ratio of 0.63,
15 pairs of 5 ms gave 0.50 to 0.68, and 150 pairs of 0.5 ms gave 0.62 to 0.634.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.decision import LIMIT

# The effects of both libraries are compared before they are timed. This finds wrong or missing work. It does not check
# rounding, which the conformance suite judges: torch's norm of 10^8 float32 elements has an error of almost 1e-3.
SPOT_CHECK_RTOL = {torch.float32: 5e-3, torch.bfloat16: 2e-2}
# An element of the largest list is about 1e-4 after clipping to norm 1.
SPOT_CHECK_ATOL = 1e-6


FEWEST_PAIRS = 5  # minimum on a slow machine
LONG_S = 0.25  # a longer call is warmed up twice, not three times


@dataclass(frozen=True)
class Workload:
    """Work to time. `call` is timed, `prepare` restores the inputs before each call and is not timed."""

    call: Callable[[], object]
    prepare: Callable[[], object] | None = None
    # Makes one call on fixed inputs and returns copies of its results.
    effect: Callable[[], list[torch.Tensor]] | None = None


@dataclass(frozen=True)
class Effort:
    """Amount of measurement. A case takes about `budget_s`, and up to three times that to reach `least_pairs`.

    After a number of pairs in `looks`, a case ends early if its interval is so narrow that an unchanged ratio cannot
    look slower. Every look is another chance of error. So all intervals are wider, and the final interval contains the
    median as often as without looks.
    """

    pairs: int = 150
    least_pairs: int = 30
    chunk_s: float = 0.0005
    budget_s: float = 10.0
    looks: tuple[int, ...] = ()
    # No look before this time, because pairs of one short moment can agree by chance.
    looks_from_s: float = 0.5

    @property
    def confidence(self) -> float:
        return 1 - 0.05 / (len(self.looks) + 1)


FULL = Effort()
QUICK = Effort(pairs=60, least_pairs=9, budget_s=1.5, looks=(8, 15, 30))
HISTORY = Effort(pairs=60, least_pairs=15, budget_s=3.0)


@dataclass(frozen=True)
class Paired:
    ratio: float  # subject ÷ reference, median over the pairs: lower is better
    low: float  # 95% interval of that median, over all looks
    high: float
    noise: float  # median absolute deviation ÷ `ratio`
    subject_s: float
    reference_s: float
    pairs: int
    # Bandwidth of the subject ÷ that of a plain copy. None if memory does not limit the call.
    share_of_copy: float | None = None


def paired(subject: Workload, reference: Workload, device: str = "cpu", effort: Effort = FULL) -> Paired:
    return by_turns(subject, [reference], device, effort)[0]


def by_turns(
    subject: Workload, references: Sequence[Workload], device: str = "cpu", effort: Effort = FULL
) -> list[Paired]:
    """Measure `subject` ÷ each reference, in chunks of several calls, in the order ABBA so that drift cancels out."""
    _check_same_effects(subject, references)
    stopwatch = CudaStopwatch() if device == "cuda" else HostStopwatch()
    works = [subject, *references]
    seconds: list[list[float]] = [[] for _ in works]
    collecting = gc.isenabled()
    gc.disable()
    try:
        calls = [_calls_per_chunk(work, stopwatch, effort.chunk_s) for work in works]
        turn = list(zip(works, calls, seconds, strict=True))
        began = time.perf_counter()
        while not _is_enough(seconds, time.perf_counter() - began, effort):
            for work, number, taken in turn:
                taken.append(stopwatch.per_call(work, number))
            turn.reverse()
    finally:
        if collecting:
            gc.enable()
    return _summaries(seconds, effort)


def _is_enough(seconds: list[list[float]], spent_s: float, effort: Effort) -> bool:
    pairs = len(seconds[0])
    return (
        pairs >= effort.pairs
        or (spent_s > effort.budget_s and pairs >= effort.least_pairs)
        or (spent_s > 3 * effort.budget_s and pairs >= FEWEST_PAIRS)
        or (
            pairs in effort.looks
            and spent_s >= effort.looks_from_s
            and all(pair.high < pair.low * LIMIT for pair in _summaries(seconds, effort))
        )
    )


def _summaries(seconds: list[list[float]], effort: Effort) -> list[Paired]:
    return [summary(seconds[0], of_reference, effort.confidence) for of_reference in seconds[1:]]


def summary(subject_s: list[float], reference_s: list[float], confidence: float = 0.95) -> Paired:
    ratios = sorted(a / b for a, b in zip(subject_s, reference_s, strict=True))
    ratio = statistics.median(ratios)
    low, high = median_interval(ratios, confidence)
    noise = statistics.median(abs(r - ratio) for r in ratios) / ratio
    return Paired(
        ratio, low, high, noise, statistics.median(subject_s), statistics.median(reference_s), len(ratios)
    )


def median_interval(ordered: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the order statistics that enclose the median of the distribution with at least this confidence.

    The number of n draws below the median is binomial(n, 1/2) for every distribution. With too few draws (under six for
    95%) the confidence is lower, and the result is their full range.
    """
    n = len(ordered)
    # `tail` is the probability that at most `below` - 1 draws are below the median.
    tail, below = 0.0, 0
    while tail + (step := math.comb(n, below) / 2**n) <= (1 - confidence) / 2:
        tail, below = tail + step, below + 1
    rank = max(below - 1, 0)
    return ordered[rank], ordered[n - 1 - rank]


class HostStopwatch:
    def per_call(self, work: Workload, calls: int) -> float:
        call, prepare, clock = work.call, work.prepare, time.perf_counter_ns
        if prepare is None:
            start = clock()
            for _ in range(calls):
                call()
            return (clock() - start) * 1e-9 / calls
        total = 0
        for _ in range(calls):
            prepare()
            start = clock()
            call()
            total += clock() - start
        return total * 1e-9 / calls


class CudaStopwatch:
    """Device time between two events. It is the launch time if the launches take longer than the kernels."""

    def per_call(self, work: Workload, calls: int) -> float:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)
        ]
        torch.cuda.synchronize()
        for start, end in events:
            if work.prepare is not None:
                work.prepare()
            start.record()
            work.call()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) * 1e-3 / calls


def _calls_per_chunk(work: Workload, stopwatch: HostStopwatch | CudaStopwatch, chunk_s: float) -> int:
    calls = 1
    # First calls build caches and compile. `effect` has made one already.
    if work.effect is None:
        stopwatch.per_call(work, 1)
    # A long call is a chunk by itself, and more warm-up costs more than it gains.
    if stopwatch.per_call(work, 1) >= LONG_S:
        return calls
    stopwatch.per_call(work, 1)
    while (took_s := stopwatch.per_call(work, calls) * calls) < chunk_s and calls < 1 << 16:
        calls = max(calls + 1, int(calls * min(10.0, chunk_s / max(took_s, 1e-9))))
    return calls


def _check_same_effects(subject: Workload, references: Sequence[Workload]) -> None:
    effects = [reference.effect for reference in references if reference.effect is not None]
    if subject.effect is None or not effects:
        return
    results = subject.effect()
    for effect in effects:
        expected = effect()
        assert len(results) == len(expected), (
            f"the subject returned {len(results)} tensors, torch {len(expected)}"
        )
        for actual, want in zip(results, expected, strict=True):
            torch.testing.assert_close(
                actual.to(want.dtype), want, rtol=SPOT_CHECK_RTOL[want.dtype], atol=SPOT_CHECK_ATOL
            )
