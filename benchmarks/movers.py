"""Movers: cases whose ratio to torch has changed between two recorded results, the largest change in seconds first.

A change is the change of the ratio times torch's time in the later result, so a machine that has become slower as a
whole moves nothing. Old results without seconds are not compared. Each change has the first cause of `CAUSES` that
applies. This module needs only Python, and git to compare impl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import curves, figures, history

METHOD, NOISE, MACHINE, CODE = "method", "noise", "machine", "code"
CAUSES = {
    METHOD: "the benchmark has another version, so the two numbers mean different things",
    NOISE: "the intervals of the two ratios overlap",
    MACHINE: "another machine or torch, an unchanged impl, or a change of torch's own time by more than half as much",
    CODE: "impl has changed, and torch's time has not",
}
MOST_SHOWN = 10
_TORCH_SHARE = 0.5  # share of the ratio's change, on a logarithmic scale
HasChanged = Callable[[str, str], bool]


@dataclass(frozen=True)
class Mover:
    """A case with an earlier and a later result."""

    case: str
    before: history.Point
    after: history.Point
    cause: str

    @property
    def seconds(self) -> float:
        """The change in seconds a call. Negative: Tandem has become faster relative to torch."""
        was, now = self.before.ratios[self.case], self.after.ratios[self.case]
        return (now.value - was.value) * (now.of_torch or 0.0)

    @property
    def change(self) -> str:
        sign = "−" if self.seconds < 0 else "+"
        return f"{sign}{figures.amount(abs(self.seconds), 'time')}"

    @property
    def ratios(self) -> str:
        return f"{self.before.ratios[self.case].value:.2f} → {self.after.ratios[self.case].value:.2f}"

    @property
    def commits(self) -> str:
        return f"{self.before.commit[:8]} → {self.after.commit[:8]}"

    @property
    def machine(self) -> str:
        names = dict.fromkeys((self.before.machine, self.after.machine))
        return " → ".join(names)


def movers(
    points: Sequence[history.Point],
    since_ms: int | None,
    has_changed: HasChanged = history.has_impl_changed,
) -> list[Mover]:
    """Return the cases with two results, the later one after `since_ms`. The largest change comes first.

    The later result of a case is its newest. The earlier one is the newest of a commit up to `since_ms`, or the oldest
    if there is none. Results of the same machine and torch come before others.

    Args:
        since_ms: date of a commit.
        has_changed: whether impl differs between two commits.
    """
    moved: list[Mover] = []
    for case in dict.fromkeys(case for point in points for case in point.ratios):
        *earlier, after = [point for point in points if _is_timed(point.ratios.get(case))] or [None]
        if after is None or not earlier or after.date_ms <= (since_ms or 0):
            continue
        own = [point for point in earlier if _place(point) == _place(after)] or earlier
        before = next((point for point in reversed(own) if point.date_ms <= (since_ms or 0)), own[0])
        changed = has_changed(before.commit, after.commit)
        moved.append(Mover(case, before, after, cause(before, after, case, has_impl_changed=changed)))
    return sorted(moved, key=lambda mover: -abs(mover.seconds))


def cause(before: history.Point, after: history.Point, case: str, *, has_impl_changed: bool) -> str:
    """Return the first cause of `CAUSES` that applies to a case."""
    was, now = before.ratios[case], after.ratios[case]
    if was.version != now.version:
        return METHOD
    lower, upper = sorted(
        (curves.mean(point, [point.ratios[case]]) for point in (before, after)), key=lambda spot: spot.value
    )
    if lower.high >= upper.low:
        return NOISE
    if _place(before) != _place(after) or not has_impl_changed or _has_torch_moved(was, now):
        return MACHINE
    return CODE


def table(moved: Sequence[Mover]) -> str:
    """Return the largest changes as Markdown."""
    if not moved:
        return "No case has two recorded results with seconds yet.\n"
    lines = [
        "| case | change a call | × torch | commits | machine | cause |",
        "|---|---|---|---|---|---|",
        *(
            f"| `{mover.case}` | {mover.change} | {mover.ratios} | {mover.commits} | {mover.machine} | {mover.cause} |"
            for mover in moved[:MOST_SHOWN]
        ),
    ]
    return "\n".join(lines) + "\n"


def legend() -> str:
    """Return the meanings of the causes as Markdown."""
    return "".join(f"- *{name}*: {meaning}.\n" for name, meaning in CAUSES.items())


def _is_timed(ratio: history.RatioPoint | None) -> bool:
    return ratio is not None and ratio.unit == "time" and ratio.of_torch is not None


def _place(point: history.Point) -> tuple[str, str | None]:
    return point.machine, point.traits.get("torch")


def _has_torch_moved(was: history.RatioPoint, now: history.RatioPoint) -> bool:
    if not was.of_torch or not now.of_torch:
        return False
    torch, ratio = math.log(now.of_torch / was.of_torch), math.log(now.value / was.value)
    return abs(torch) > _TORCH_SHARE * abs(ratio)
