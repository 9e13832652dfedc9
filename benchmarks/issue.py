"""Text of an issue on the regressions of a run, for a person to open. Nothing here opens one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import decision, figures, history, movers

_MOST_COMMITS = 20


def issue(
    report: Mapping[str, Any],
    after: history.Point,
    earlier: Sequence[history.Point],
    has_changed: movers.HasChanged = history.has_impl_changed,
) -> str:
    """Return the title and the body in Markdown, or an empty string if nothing regressed.

    Args:
        report: the report of `python -m benchmarks --json`.
        after: the results of the same run.
        earlier: the recorded results that the run was judged by, oldest first.
    """
    rows = [row for row in report["rows"] if row.get("verdict") in decision.RED]
    if not rows:
        return ""
    before = {row["name"]: _newest(earlier, row["name"]) for row in rows}
    oldest = min(before.values(), key=lambda point: point.date_ms)
    others = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    traits = after.traits
    gpu = "no GPU" if traits["gpu"] == "none" else traits["gpu"]
    lines = [
        f"Title: {rows[0]['reported']}{others}",
        "",
        "| case | before | after | change a call | cause |",
        "|---|---|---|---|---|",
        *(_row(row, before[row["name"]], after, has_changed) for row in rows),
        "",
        f"Machine: {after.machine} ({traits['cpu']}, {traits['num_cpu']} cores, {gpu}), torch {traits['torch']}, "
        f"Python {traits['python']}.",
        "",
        *_commits(oldest, after),
        "",
        "To reproduce:",
        "",
        "```bash",
        *(
            f'ci/bench --commit {point.commit[:8]} --machine {after.machine} --only "{row["name"]}"'
            for row in rows
            for point in (before[row["name"]], after)
        ),
        "```",
        "",
        movers.legend(),
    ]
    return "\n".join(lines)


def _newest(points: Sequence[history.Point], case: str) -> history.Point:
    return next(point for point in reversed(points) if case in point.ratios)


def _row(
    row: Mapping[str, Any], before: history.Point, after: history.Point, has_changed: movers.HasChanged
) -> str:
    case = row["name"]
    was = _side(f"{row['was']:.2f}", before, case)
    if case not in after.ratios:
        return f"| `{case}` | {was} | {row['outcome']}: {row.get('why', '')} | | |"
    repeated = ", ".join(f"{ratio:.2f}" for ratio in (row["ratio"], *row["again"]))
    changed = has_changed(before.commit, after.commit)
    mover = movers.Mover(case, before, after, movers.cause(before, after, case, has_impl_changed=changed))
    is_unsure = mover.cause == movers.CODE and before.ratios[case].of_torch is None
    cause = f"{mover.cause}, unless torch's time moved (it was not recorded)" if is_unsure else mover.cause
    return f"| `{case}` | {was} | {_side(repeated, after, case)} | {mover.change} | {cause} |"


def _side(ratios: str, point: history.Point, case: str) -> str:
    ratio = point.ratios[case]
    seconds = ""
    if ratio.of_impl is not None and ratio.of_torch is not None:
        seconds = (
            f" ({figures.amount(ratio.of_impl, 'time')}, torch {figures.amount(ratio.of_torch, 'time')})"
        )
    return f"{ratios} × torch{seconds} at {point.commit[:8]}"


def _commits(before: history.Point, after: history.Point) -> list[str]:
    subjects = history.subjects(f"{before.commit}..{after.commit}", "--", "impl")
    span = f"{before.commit[:8]}..{after.commit[:8]}"
    if not subjects:
        return [f"Commits: {span}, of which git lists none that changes impl."]
    shown = [f"- {commit[:8]} {subject}" for commit, subject in list(subjects.items())[:_MOST_COMMITS]]
    hidden = len(subjects) - len(shown)
    return [f"Commits of impl in {span}:", "", *shown, *([f"- and {hidden} more"] if hidden else [])]
