"""Earlier ratios: recorded results or a baseline to judge by, and results of other machines to show.

The functions for judging also return a text: `against` names the source, `not_judged` says why there is none.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import decision, history

# Keys that must be equal in two reports for their ratios to be comparable.
_SAME_MACHINE = ("torch", "cores", "threads", "instructions", "device")
_CURES = (
    "record one by ci/bench, or by ci/bench --add report after ci/gate; --machine NAME uses the results of a pool of "
    "equal machines, --baseline an earlier run"
)


def of_points(
    machine: str, torch: str, subject: str, before_ms: int
) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Return the newest ratios recorded on `machine` with this `torch`, at commits before a date.

    There are none if `machine` is empty, which means that this machine has recorded nothing.
    """
    if subject != "impl":
        return {
            "not_judged": f"results are recorded of impl, and this is {subject}; --baseline uses an earlier run"
        }, {}
    points = [point for point in history.of_machine(machine, torch) if point.date_ms < before_ms]
    ratios = history.ratios_by_case(points, decision.EARLIER_POINTS)
    if not ratios:
        missing = (
            f"{machine} has no earlier recorded results with torch {torch}"
            if machine
            else "this machine has no recorded results"
        )
        return {"not_judged": f"{missing} ({_CURES})"}, {}
    return {
        "against": f"the recorded results of {machine} with torch {torch}, the newest {points[-1].commit[:8]}"
    }, ratios


def of_baseline(
    report: dict[str, Any], subject: str, here: dict[str, Any]
) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Return the ratios of a baseline report that the user names, if it is comparable."""
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
    """Return the newest ratios of other machines with the same torch. They are shown and not judged by."""
    names = sorted({point.machine for point in history.points()} - {machine})
    by_machine = {
        name: history.ratios_by_case(history.of_machine(name, torch), decision.EARLIER_POINTS)
        for name in names
    }
    return {
        name: {case: statistics.median(of_case) for case, of_case in ratios.items()}
        for name, ratios in by_machine.items()
        if ratios
    }
