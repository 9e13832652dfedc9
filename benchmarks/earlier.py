"""What the ratios of today are judged by, if there is anything, and what is only shown beside them.

Both of the former say in words what it is, `against`, or why the run is `not_judged`.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import decision, history

# Of two reports whose ratios can be compared.
_SAME_MACHINE = ("torch", "cores", "threads", "instructions", "device")
_CURES = (
    "ci/bench makes one, ci/bench --add report of a gate's timings; --machine NAME takes those of a pool of equal "
    "machines, --baseline an earlier run"
)


def of_points(
    machine: str, torch: str, subject: str, before_ms: int
) -> tuple[dict[str, str], dict[str, list[float]]]:
    """The newest points of a machine, empty if this one has no name, with that torch and of commits before a date."""
    if subject != "impl":
        return {
            "not_judged": f"points are impl's, and this is {subject}; --baseline takes an earlier run"
        }, {}
    found = [point for point in history.of_machine(machine, torch) if point.date_ms < before_ms]
    ratios = history.ratios_by_case(found, decision.EARLIER_POINTS)
    if not ratios:
        whose = (
            f"{machine} has no earlier points with torch {torch}" if machine else "this machine has no points"
        )
        return {"not_judged": f"{whose} ({_CURES})"}, {}
    return {
        "against": f"the points of {machine} with torch {torch}, the newest {found[-1].commit[:8]}"
    }, ratios


def of_baseline(
    report: dict[str, Any], subject: str, here: dict[str, Any]
) -> tuple[dict[str, str], dict[str, list[float]]]:
    """A run that the user names."""
    speed = report.get("speed") or report
    rows, there = speed.get("rows", []), speed.get("machine", {})
    if not rows:
        return {"not_judged": "the baseline has no timings"}, {}
    differ = [key for key in _SAME_MACHINE if there.get(key) != here[key]]
    differ += ["subject"] if report.get("subject") != subject else []
    if differ:
        return {"not_judged": f"the baseline differs in {', '.join(differ)}"}, {}
    measured = (row for row in rows if row["outcome"] == "measured")
    return {"against": "the baseline"}, {row["name"]: [row["ratio"]] for row in measured}


def elsewhere(machine: str, torch: str) -> dict[str, dict[str, float]]:
    """By other machines with the same torch the ratios of their newest points: to be seen, not to judge by."""
    names = sorted({point.machine for point in history.points()} - {machine})
    found = {
        name: history.ratios_by_case(history.of_machine(name, torch), decision.EARLIER_POINTS)
        for name in names
    }
    return {
        name: {case: statistics.median(of_case) for case, of_case in ratios.items()}
        for name, ratios in found.items()
        if ratios
    }
