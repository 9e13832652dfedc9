"""The course of an area over commits: the geometric mean of its cases' ratios, with an interval.

Points differ in what they measured. A case that a commit lacks counts as at the nearest commit that has it, so that a
curve moves where something was measured and not where a case came or went; a commit that lacks most cases is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks import decision, history

# Half of a ratio's 95% interval, in parts of its noise, if it is the median of nine pairs, the fewest of a quick case:
# 1.96 standard errors, each 1.253 / 3 of a standard deviation, which is 1.483 of the median deviation.
_HALF_INTERVAL = 1.96 * 1.253 / 3 * 1.483
_LEAST_SHARE = 0.5  # of the cases


@dataclass(frozen=True)
class Spot:
    """One commit of a curve."""

    point: history.Point
    value: float
    low: float  # 95% interval, as far as the pairs' spread tells it
    high: float


@dataclass(frozen=True)
class Curve:
    name: str  # empty if it is the only one of its area
    spots: Sequence[Spot]  # the oldest first, at least one

    @property
    def now(self) -> Spot:
        return self.spots[-1]

    @property
    def mark(self) -> str:
        if self.now.low > decision.SURELY:
            return "slower"
        return "faster" if self.now.high < 1 / decision.SURELY else "even"


def spots(points: Sequence[history.Point], cases: Collection[str]) -> list[Spot]:
    """The course of these cases' mean, the oldest point first."""
    measured = {case for case in cases if any(case in point.ratios for point in points)}
    own = [
        point
        for point in points
        if measured and len(measured & point.ratios.keys()) >= _LEAST_SHARE * len(measured)
    ]
    columns = [_filled([point.ratios.get(case) for point in own]) for case in sorted(measured)]
    rows = zip(*(column for column in columns if column), strict=True)
    return [_mean(point, row) for point, row in zip(own, rows, strict=True)]


def _filled(ratios: Sequence[history.RatioPoint | None]) -> list[history.RatioPoint]:
    """With the nearest one, the later of two, where there is none; empty if there is none at all."""
    known = [(position, ratio) for position, ratio in enumerate(ratios) if ratio is not None]
    if not known:
        return []
    return [
        ratio or min(known, key=lambda one: (abs(one[0] - position), -one[0]))[1]
        for position, ratio in enumerate(ratios)
    ]


def _mean(point: history.Point, ratios: Sequence[history.RatioPoint]) -> Spot:
    value = math.exp(statistics.fmean(math.log(ratio.value) for ratio in ratios))
    noises = [0.0 if math.isnan(ratio.noise) else ratio.noise for ratio in ratios]
    half = _HALF_INTERVAL * math.hypot(*noises) / len(noises)
    return Spot(point, value, value * math.exp(-half), value * math.exp(half))


def since(points: Sequence[history.Point], case: str, limit: float) -> history.Point | None:
    """The first of the points up to the newest at which a case lies above a ratio; None if it does not."""
    first = None
    for point in reversed(points):
        if case in point.ratios:
            if point.ratios[case].value <= limit:
                break
            first = point
    return first
