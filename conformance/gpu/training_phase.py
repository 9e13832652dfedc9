"""The gate's training runs, with torch's parts and with the subject's, beside each other."""

from __future__ import annotations

from conformance.gpu.phase_rows import PhaseTask, Rows, serve
from conformance.training.config import DTYPES, small_config
from conformance.training.judge import as_json, judge


def work(task: PhaseTask, rows: Rows) -> None:
    rows.plan(DTYPES)
    for dtype in DTYPES:
        if rows.left_s <= 0:
            return
        judged = as_json([judge(task.subject, small_config(dtype, device=task.device))])
        reasons = [f"{run['name']}: {reason}" for run in judged["runs"] for reason in run["reasons"]]
        rows.add(dtype, "failed" if reasons else "agrees", "; ".join(reasons), **judged)


if __name__ == "__main__":
    serve(work)
