"""First page of the dashboard: each area over commits, and the cases that are slower than torch or than before.

`python -m benchmarks.landing FILE` draws it from `benchmarks/results`, with links to asv's pages in the same folder.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from benchmarks import (
    asv_format,
    catalogue,
    comparison,
    curves,
    decision,
    drawing,
    figures,
    history,
    movers,
)
from benchmarks.common import LEFT_OUT_OF_HISTORY

_TEMPLATE = Path(__file__).with_name("landing.html")
_SHOWN_HASH = 8
_STEADY = 1.05  # largest change of a steady mean
# Areas of every training step come first, one-off work last.
AREAS = (
    "FSDP step", "AMP step", "Fused AMP step", "Clipping", "GradScaler", "Captured optimizer", "Compiled optimizer",
    "Growth of the cost", "FSDP step against other APIs of torch", "FSDP: overhead of a unit", "fully_shard step",
    "Peak memory", "Bytes through collectives", "autocast", "Checkpoints", "One-off work",
)  # fmt: skip


@dataclass(frozen=True)
class Label:
    """Title, place and asv benchmark of a case on the page."""

    title: str
    benchmark: str  # name in asv
    parameters: dict[str, Any]
    area: str = "Clipping"
    curve: str = ""  # name within the area
    unit: str = "time"  # "time" or "bytes"
    is_one_off: bool = False

    @property
    def case(self) -> str:
        return ", ".join(str(value) for name, value in self.parameters.items() if name != "subject")

    def link(self, machine: str) -> str:
        """Return the link to the curve of this case on `machine` in asv's pages."""
        query = {"machine": machine} | {f"p-{name}": repr(value) for name, value in self.parameters.items()}
        return f"asv.html#{self.benchmark}?{urlencode(query, quote_via=quote)}"


@dataclass(frozen=True)
class LatestRatio:
    """The ratio of a case at the newest point that has it, with its history."""

    label: Label
    machine: str
    now: history.RatioPoint
    was: float | None  # median of the points before, None if there are none
    course: Sequence[float]  # all ratios of the case, oldest first
    since: history.Point | None = None  # first point of a slower or worse case

    @property
    def mark(self) -> str:
        return _mark(self.label, self.now, self.was)

    @property
    def change(self) -> str:
        return "" if self.was is None else f"{100 * (self.now.value / self.was - 1):+.0f}%".replace("-", "−")

    @property
    def share_of_copy(self) -> str:
        return "" if self.now.share_of_copy is None else f"{self.now.share_of_copy:.0%}"

    @property
    def spark(self) -> str:
        first, *_, last = (*self.course, self.course[-1])
        return drawing.sparkline(
            self.course, f"{len(self.course)} results, from {first:.3f} to {last:.3f}, "
            f"lowest {min(self.course):.3f}, highest {max(self.course):.3f}",
        )  # fmt: skip


def _mark(label: Label, now: history.RatioPoint, was: float | None) -> str:
    # Points store no seconds, and one-off work cannot be judged without them (see decision).
    if was is not None and now.value > decision.LIMIT * was and not label.is_one_off:
        return "worse"
    noise = 0.0 if math.isnan(now.noise) else now.noise
    if now.value * (1 - noise) > decision.SURELY:
        return "slower"
    return "faster" if now.value * (1 + noise) < 1 / decision.SURELY else "even"


@dataclass(frozen=True)
class DashboardArea:
    """Curves and cases of one area, with a summary in words."""

    name: str
    unit: str
    curves: Sequence[curves.Curve]
    cases: Sequence[LatestRatio]

    @property
    def finding(self) -> str:
        now = [(drawing.in_digits(curve.now.value), curve.name) for curve in self.curves]
        if len(now) == 1:
            return f"{now[0][0]} × torch's {self.unit}"
        return f"{', '.join(f'{value} {_in_brackets(name)}' for value, name in now)} × torch's {self.unit}"

    @property
    def detail(self) -> str:
        return f"{self._trend}; {self._slower}"

    @property
    def _trend(self) -> str:
        first, now = (
            math.prod(spot.value for spot in spots)
            for spots in ([curve.spots[0] for curve in self.curves], [curve.now for curve in self.curves])
        )
        change = (now / first) ** (1 / len(self.curves))
        oldest = min((curve.spots[0].point for curve in self.curves), key=lambda point: point.date_ms)
        began = f"since {drawing.day(oldest)}"
        if max(len(curve.spots) for curve in self.curves) == 1:
            return "one result so far"
        if 1 / _STEADY < change < _STEADY:
            return f"steady {began}"
        together = "together " if len(self.curves) > 1 else ""
        return f"{together}{'down' if change < 1 else 'up'} by {abs(100 * (change - 1)):.0f}% {began}"

    @property
    def _slower(self) -> str:
        slower = sum(case.now.value * (1 - (case.now.noise or 0.0)) > decision.SURELY for case in self.cases)
        word = "slower than" if self.unit == "time" else "above"
        cases = "case" if len(self.cases) == 1 else "cases"
        return f"{slower} of {len(self.cases)} {cases} {word} torch"

    def picture(self, subjects: Mapping[str, str], width: int) -> str:
        return drawing.picture(self.curves, f"{self.name}: {self.finding}", subjects, width)


def _in_brackets(name: str) -> str:
    return f"({name})" if name else ""


@dataclass(frozen=True)
class Machine:
    name: str
    newest: history.Point
    points: int
    newer_commits: int | None  # commits of impl since then, None without git
    cases: list[LatestRatio]  # worst first
    areas: list[DashboardArea]

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.newest.date_ms / 1000))

    @property
    def commit(self) -> str:
        return self.newest.commit[:_SHOWN_HASH]

    @property
    def about(self) -> str:
        traits = self.newest.traits
        gpu = "no GPU" if traits["gpu"] == "none" else f"{traits['gpu']}, driver {traits['driver']}"
        return f"{traits['cpu']}, {traits['num_cpu']} cores, {traits['ram']}, {gpu}"

    @property
    def versions(self) -> str:
        return f"torch {self.newest.traits['torch']}, Python {self.newest.traits['python']}"

    @property
    def first(self) -> list[LatestRatio]:
        """The cases to look at first: slower than torch, or worse than before."""
        return [case for case in self.cases if case.mark in ("worse", "slower")]

    @property
    def mean(self) -> float:
        return math.exp(statistics.fmean(math.log(case.now.value) for case in self.timed))

    @property
    def faster(self) -> int:
        return sum(case.mark == "faster" for case in self.timed)

    @property
    def timed(self) -> list[LatestRatio]:
        return [case for case in self.cases if case.label.unit == "time"]


def machines(points: Sequence[history.Point], label: dict[str, Label]) -> list[Machine]:
    """Return the machines to show, newest point first. `label` has the cases to show."""
    shown: list[Machine] = []
    for name in {point.machine for point in points}:
        own = [point for point in points if point.machine == name and point.ratios.keys() & label.keys()]
        if not own:
            continue
        cases = [
            _case(label[case], own, case) for case in label if any(case in point.ratios for point in own)
        ]
        order = sorted(cases, key=lambda case: (case.mark != "worse", -case.now.value))
        newer = history.commits_since(own[-1].commit)
        shown.append(Machine(name, own[-1], len(own), newer, order, _areas(own, label, cases)))
    return sorted(shown, key=lambda machine: -machine.newest.date_ms)


def _case(label: Label, own: Sequence[history.Point], name: str) -> LatestRatio:
    with_case = [point for point in own if name in point.ratios]
    now, course = with_case[-1].ratios[name], [point.ratios[name].value for point in with_case]
    earlier = course[-1 - decision.EARLIER_POINTS : -1]
    was = statistics.median(earlier) if earlier else None
    limit = {"worse": decision.LIMIT * (was or 0.0), "slower": 1.0}.get(_mark(label, now, was), math.inf)
    return LatestRatio(label, own[-1].machine, now, was, course, curves.since(own, name, limit))


def _areas(
    own: Sequence[history.Point], label: Mapping[str, Label], cases: Sequence[LatestRatio]
) -> list[DashboardArea]:
    areas: list[DashboardArea] = []
    for area in AREAS:
        names = [name for name in label if label[name].area == area]
        lines = dict.fromkeys(label[name].curve for name in names)
        drawn = [
            curves.Curve(line, spots)
            for line in lines
            if (spots := curves.spots(own, [name for name in names if label[name].curve == line]))
        ]
        if drawn:
            inside = [case for case in cases if case.label.area == area]
            areas.append(DashboardArea(area, inside[0].label.unit, drawn, inside))
    return areas


def headlines() -> dict[str, Label]:
    """Return the cases that `ci/bench --history` measures, by their names in a point."""
    labels: dict[str, Label] = {}
    for kind in filter(catalogue.is_tracked, catalogue.load_all()):
        for case in catalogue.cases(kind, LEFT_OUT_OF_HISTORY):
            parameters = dict(zip(kind.param_names, case, strict=True))
            if parameters.get("subject", "impl") == "impl":
                values = [value for name, value in parameters.items() if name != "subject"]
                labels[catalogue.name_of(kind, tuple(values))] = _label(kind, parameters)
    return labels


def _label(kind: Any, parameters: dict[str, Any]) -> Label:
    is_ratio = issubclass(kind, comparison.Ratio)
    method = "track_ratio_vs_torch" if is_ratio else "track_bytes"
    return Label(
        kind.title if is_ratio else kind.track_bytes.pretty_name,
        asv_format.name_of(kind, method),
        parameters,
        kind.area,
        re.sub(r"^1 (\w+)s$", r"1 \1", kind.curve.format(**parameters)),
        "time" if is_ratio else "bytes",
        getattr(kind, "is_one_off", False),
    )


def page(
    shown: list[Machine],
    subjects: Mapping[str, str] | None = None,
    quoted: Sequence[figures.Figure] = (),
    moved: Sequence[movers.Mover] = (),
) -> str:
    """Return the page as HTML. `subjects` maps commit ids to the subjects of their messages."""
    import jinja2  # noqa: PLC0415 (asv imports each module of this folder, also where there is no jinja2)

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"day": drawing.day, "ratio": drawing.in_digits}
    template = environment.from_string(_TEMPLATE.read_text())
    return template.render(
        machines=shown,
        limit=decision.LIMIT,
        earlier=decision.EARLIER_POINTS,
        subjects=subjects or {},
        figures=quoted,
        movers=moved[: movers.MOST_SHOWN],
        causes=movers.CAUSES,
    )


def main(file: Path) -> None:
    points = history.points()
    moved = movers.movers(points, history.release_date_ms())
    text = page(machines(points, headlines()), history.subjects(), figures.figures(points), moved)
    file.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
