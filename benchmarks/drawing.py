"""Pictures of curves as inline SVG, without libraries or network. The page defines the colours."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks import history
from benchmarks.curves import Curve, Spot

# `_ratio_axis` takes the first, finest row that gives at most `_MOST_TICKS` ticks.
_TICKS = (
    (0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0),
    (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0),
    (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0),
    (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0),
)
_MOST_TICKS = 6
# Least ratio of the highest to the lowest value of an axis, so that noise does not fill the picture.
_LEAST_SPAN = 1.6
_LINE_HEIGHT = 15.0
_DATE_WIDTH, _LETTER_WIDTH = 48.0, 7.2
_LINES_OF_A_PICTURE = 4  # number of line colours in the page


@dataclass(frozen=True)
class _Scale:
    """Map from commit positions and ratios (on a logarithmic axis) to picture coordinates."""

    left: float
    right: float
    top: float
    bottom: float
    commits: int
    lowest: float
    highest: float

    def x(self, position: int) -> float:
        return round(self.left + (self.right - self.left) * (position + 0.5) / self.commits, 1)

    def y(self, ratio: float) -> float:
        share = math.log(ratio / self.lowest) / math.log(self.highest / self.lowest)
        return round(self.bottom - (self.bottom - self.top) * share, 1)


def picture(curves: Sequence[Curve], alt_text: str, subjects: Mapping[str, str], width: int = 360) -> str:
    """Return the picture of an area: axes, bands, lines, a label at each line's end, and a tooltip for each commit."""
    height, longest = 190, max(len(_label(curve)) for curve in curves)
    points = sorted(
        {spot.point.commit: spot.point for curve in curves for spot in curve.spots}.values(),
        key=lambda point: (point.date_ms, point.commit),
    )
    low, high = _range([bound for curve in curves for spot in curve.spots for bound in (spot.low, spot.high)])
    scale = _Scale(34, width - 12 - _LETTER_WIDTH * longest, 10, height - 24, len(points), low, high)
    at = {point.commit: scale.x(position) for position, point in enumerate(points)}
    parts = [_ratio_axis(scale), _commit_axis(scale, points)]
    shown = list(zip(curves, itertools.cycle(range(_LINES_OF_A_PICTURE)), strict=False))
    parts += [_band(scale, at, curve, colour) for curve, colour in shown]
    parts += [_line(scale, at, curve, colour) for curve, colour in shown]
    parts += _end_labels(scale, shown)
    parts += [_tooltip(scale, at, point, curves, subjects) for point in points]
    return (
        f'<svg class="picture" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(alt_text)}">'
        f"{''.join(parts)}</svg>"
    )


def sparkline(ratios: Sequence[float], alt_text: str) -> str:
    """Return a small curve for a table cell: torch as a dashed line, a dot on the newest ratio."""
    low, high = _range(ratios, around_one=False)
    scale = _Scale(2, 108, 3, 21, len(ratios), low, high)
    path = " ".join(f"{scale.x(position)},{scale.y(ratio)}" for position, ratio in enumerate(ratios))
    torch_line = f'<path class="torch" d="M2 {scale.y(1.0)}H108"/>' if low <= 1.0 <= high else ""
    return (
        f'<svg class="spark" viewBox="0 0 110 24" role="img" aria-label="{escape(alt_text)}">'
        f'<title>{escape(alt_text)}</title>{torch_line}<polyline class="line" points="{path}"/>'
        f'<circle class="dot" cx="{scale.x(len(ratios) - 1)}" cy="{scale.y(ratios[-1])}" r="2.5"/></svg>'
    )


def day(point: history.Point) -> str:
    return _date(point, "%-d %b")


def _date(point: history.Point, form: str) -> str:
    return time.strftime(form, time.gmtime(point.date_ms / 1000))


def _range(ratios: Sequence[float], around_one: bool = True) -> tuple[float, float]:
    low, high = (
        min(*ratios, *([1.0] if around_one else ratios)),
        max(*ratios, *([1.0] if around_one else ratios)),
    )
    more = max(1.04, math.sqrt(_LEAST_SPAN / (high / low)))
    return low / more, high * more


def _ratio_axis(scale: _Scale) -> str:
    inside = [[tick for tick in ticks if scale.lowest <= tick <= scale.highest] for ticks in _TICKS]
    ticks = next((ticks for ticks in inside if len(ticks) <= _MOST_TICKS), inside[-1])
    parts = [
        f'<path class="grid" d="M{scale.left} {scale.y(tick)}H{scale.right}"/>'
        for tick in ticks
        if tick != 1.0
    ]
    parts += [
        f'<text class="axis" x="{scale.left - 5}" y="{scale.y(tick) + 4}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
    ]
    parts.append(f'<path class="torch" d="M{scale.left} {scale.y(1.0)}H{scale.right}"/>')
    return "".join(parts)


def _commit_axis(scale: _Scale, points: Sequence[history.Point]) -> str:
    """Return the axis with a date below the first commit of each day, where there is room, and below the last day."""
    days = [day(point) for point in points]
    shown: list[int] = []
    for position, name in enumerate(days):
        free = not shown or scale.x(position) - scale.x(shown[-1]) >= _DATE_WIDTH
        if free and name not in days[:position]:
            shown.append(position)
    parts = [f'<path class="grid" d="M{scale.left} {scale.bottom}H{scale.right}"/>']
    if days[shown[-1]] != days[-1] and scale.x(len(days) - 1) - scale.x(shown[-1]) >= 2 * _DATE_WIDTH:
        shown.append(len(days) - 1)
    for position in shown:
        x, is_last = scale.x(position), position == len(days) - 1 > 0
        parts.append(f'<path class="grid" d="M{x} {scale.bottom}v5"/>')
        where = f'x="{x}" y="{scale.bottom + 18}" text-anchor="{"end" if is_last else "start"}"'
        parts.append(f'<text class="axis" {where}>{days[position]}</text>')
    return "".join(parts)


def _band(scale: _Scale, at: Mapping[str, float], curve: Curve, colour: int) -> str:
    above = [f"{at[spot.point.commit]},{scale.y(spot.high)}" for spot in curve.spots]
    below = [f"{at[spot.point.commit]},{scale.y(spot.low)}" for spot in reversed(curve.spots)]
    return f'<polygon class="band c{colour}" points="{" ".join(above + below)}"/>'


def _line(scale: _Scale, at: Mapping[str, float], curve: Curve, colour: int) -> str:
    path = " ".join(f"{at[spot.point.commit]},{scale.y(spot.value)}" for spot in curve.spots)
    x, y = at[curve.now.point.commit], scale.y(curve.now.value)
    return f'<polyline class="line c{colour}" points="{path}"/><circle class="dot c{colour}" cx="{x}" cy="{y}" r="3"/>'


def _end_labels(scale: _Scale, shown: Sequence[tuple[Curve, int]]) -> list[str]:
    """Return labels at the ends of the lines, moved apart so that they do not overlap."""
    parts: list[str] = []
    lowest_free = -math.inf
    ordered = sorted(shown, key=lambda entry: -entry[0].now.value)
    room = len(ordered) * _LINE_HEIGHT
    for position, (curve, colour) in enumerate(ordered):
        # Leave room for the labels below this one.
        most = scale.bottom - room + (position + 1) * _LINE_HEIGHT
        y = max(min(scale.y(curve.now.value) + 4, most), lowest_free)
        lowest_free = y + _LINE_HEIGHT
        x, text = scale.right + 4, escape(_label(curve))
        parts.append(f'<text class="end c{colour}" x="{x:.1f}" y="{y:.1f}">{text}</text>')
    return parts


def _label(curve: Curve) -> str:
    return f"{in_digits(curve.now.value)} {curve.name}".strip()


def _tooltip(
    scale: _Scale,
    at: Mapping[str, float],
    point: history.Point,
    curves: Sequence[Curve],
    subjects: Mapping[str, str],
) -> str:
    values = [
        (curve.name, spot) for curve in curves for spot in curve.spots if spot.point.commit == point.commit
    ]
    lines = [f"{point.commit[:8]}, {_date(point, '%-d %b %Y %H:%M UTC')}"]
    lines += [subjects[point.commit]] if point.commit in subjects else []
    lines += [f"{name} {_text(spot)}".strip() for name, spot in values]
    step = (scale.right - scale.left) / scale.commits
    x = at[point.commit] - step / 2
    return (
        f'<rect class="hit" x="{x:.1f}" y="{scale.top}" width="{step:.1f}" height="{scale.bottom - scale.top}">'
        f"<title>{escape(chr(10).join(lines))}</title></rect>"
    )


def _text(spot: Spot) -> str:
    return f"{in_digits(spot.value)} ({in_digits(spot.low)} to {in_digits(spot.high)})"


def in_digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"
