"""Curves of the dashboard: the geometric mean of an area's ratios at each commit, with an interval.

Recorded results do not all have the same cases. A case that a commit lacks counts with its value at the nearest commit
that has it. So a curve does not move when a case is added or removed. A commit that lacks most cases is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks import decision, history

# Half of a ratio's 95% interval as a multiple of its noise, for the median of nine pairs (the minimum of a quick case).
# It is 1.96 standard errors of 1.253 / 3 standard deviations each, and a standard deviation is 1.483 median deviations.
_HALF_INTERVAL = 1.96 * 1.253 / 3 * 1.483
_LEAST_SHARE = 0.5  # share of the cases


@dataclass(frozen=True)
class Spot:
    """The value of a curve at a commit."""

    point: history.Point
    value: float
    low: float  # 95% interval, estimated from the spread of the pairs
    high: float


@dataclass(frozen=True)
class Curve:
    name: str  # empty if the area has no other curve
    spots: Sequence[Spot]  # oldest first, at least one

    @property
    def now(self) -> Spot:
        return self.spots[-1]

    @property
    def mark(self) -> str:
        if self.now.low > decision.SURELY:
            return "slower"
        return "faster" if self.now.high < 1 / decision.SURELY else "even"


def spots(points: Sequence[history.Point], cases: Collection[str]) -> list[Spot]:
    """Return the mean of these cases at each commit, oldest first."""
    measured = {case for case in cases if any(case in point.ratios for point in points)}
    own = [
        point
        for point in points
        if measured and len(measured & point.ratios.keys()) >= _LEAST_SHARE * len(measured)
    ]
    columns = [_filled([point.ratios.get(case) for point in own]) for case in sorted(measured)]
    rows = zip(*(column for column in columns if column), strict=True)
    return [mean(point, row) for point, row in zip(own, rows, strict=True)]


def _filled(ratios: Sequence[history.RatioPoint | None]) -> list[history.RatioPoint]:
    """Replace each None by the nearest ratio, the later of two equally near. Return [] if all are None."""
    known = [(position, ratio) for position, ratio in enumerate(ratios) if ratio is not None]
    if not known:
        return []
    return [
        ratio or min(known, key=lambda entry: (abs(entry[0] - position), -entry[0]))[1]
        for position, ratio in enumerate(ratios)
    ]


def mean(point: history.Point, ratios: Sequence[history.RatioPoint]) -> Spot:
    """Return the geometric mean of ratios with its interval."""
    value = math.exp(statistics.fmean(math.log(ratio.value) for ratio in ratios))
    noises = [0.0 if math.isnan(ratio.noise) else ratio.noise for ratio in ratios]
    half = _HALF_INTERVAL * math.hypot(*noises) / len(noises)
    return Spot(point, value, value * math.exp(-half), value * math.exp(half))


def since(points: Sequence[history.Point], case: str, limit: float) -> history.Point | None:
    """Return the first of the newest consecutive points at which a case is above `limit`, or None."""
    first = None
    for point in reversed(points):
        if case in point.ratios:
            if point.ratios[case].value <= limit:
                break
            first = point
    return first
