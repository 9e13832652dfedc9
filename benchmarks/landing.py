"""The dashboard's first page: how fresh the points are, what has become slower, what is slower than torch, the rest.

`python -m benchmarks.landing FILE` draws it from `benchmarks/results`, with links into asv's pages beside it.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from benchmarks import asv_format, catalogue, comparison, decision, history
from benchmarks.common import LEFT_OUT_OF_QUICK

_TEMPLATE = Path(__file__).with_name("landing.html")
_SHOWN_HASH = 8


@dataclass(frozen=True)
class Told:
    """How the page speaks of a case."""

    title: str
    benchmark: str  # its name in asv
    parameters: dict[str, Any]

    @property
    def case(self) -> str:
        return ", ".join(map(str, self.parameters.values()))

    def link(self, machine: str) -> str:
        """Into asv's pages: the curve of this case on that machine."""
        chosen = {"machine": machine} | {f"p-{name}": repr(value) for name, value in self.parameters.items()}
        return f"asv.html#{self.benchmark}?{urlencode(chosen, quote_via=quote)}"


@dataclass(frozen=True)
class Case:
    """A ratio at the newest point that has it, and what it was at the points before."""

    told: Told
    machine: str
    now: history.Ratio
    was: float | None  # median of the points before; None if there are none

    @property
    def mark(self) -> str:
        if self.was is not None and self.now.value > decision.LIMIT * self.was:
            return "worse"
        if self.now.value * (1 - self.now.noise) > decision.SURELY:
            return "slower"
        return "faster" if self.now.value * (1 + self.now.noise) < 1 / decision.SURELY else "even"

    @property
    def change(self) -> str:
        return "" if self.was is None else f"{100 * (self.now.value / self.was - 1):+.0f}%".replace("-", "−")


@dataclass(frozen=True)
class Machine:
    name: str
    newest: history.Point
    points: int
    behind: int | None  # commits of impl since the newest point; None where git cannot tell
    cases: list[Case]  # the worst first

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
    def first(self) -> list[Case]:
        """What a reviewer should look at before the rest."""
        return [case for case in self.cases if case.mark in ("worse", "slower")]

    @property
    def mean(self) -> float:
        return math.exp(statistics.fmean(math.log(case.now.value) for case in self.cases))


def machines(points: Sequence[history.Point], told: dict[str, Told]) -> list[Machine]:
    """By machine, the one with the newest point first. `told` has the cases to show."""
    found: list[Machine] = []
    for name in {point.machine for point in points}:
        own = [point for point in points if point.machine == name and point.ratios.keys() & told.keys()]
        if not own:
            continue
        ratios = history.ratios_by_case(own, 1 + decision.EARLIER_POINTS)
        cases = [
            _case(told[name], own, name, earlier) for name, (_, *earlier) in ratios.items() if name in told
        ]
        order = sorted(cases, key=lambda case: (case.mark != "worse", -case.now.value))
        found.append(Machine(name, own[-1], len(own), history.commits_since(own[-1].commit), order))
    return sorted(found, key=lambda machine: -machine.newest.date_ms)


def _case(told: Told, own: list[history.Point], name: str, earlier: list[float]) -> Case:
    now = next(point.ratios[name] for point in reversed(own) if name in point.ratios)
    return Case(told, own[-1].machine, now, statistics.median(earlier) if earlier else None)


def headlines() -> dict[str, Told]:
    """The cases that tell most, by name."""
    kinds = [kind for kind in catalogue.load_all() if issubclass(kind, comparison.Ratio)]
    return {
        catalogue.name_of(kind, case): Told(
            kind.title,
            asv_format.name_of(kind, "track_ratio_vs_torch"),
            dict(zip(kind.param_names, case, strict=True)),
        )
        for kind in kinds
        for case in catalogue.cases(kind, LEFT_OUT_OF_QUICK)
    }


def page(found: list[Machine]) -> str:
    import jinja2  # noqa: PLC0415 (asv imports each module of this folder, also where there is no jinja2)

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_TEMPLATE.read_text())
    return template.render(machines=found, limit=decision.LIMIT, earlier=decision.EARLIER_POINTS)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(machines(history.points(), headlines())))
