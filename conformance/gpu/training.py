"""The gate's training runs, with torch's parts and with the subject's, beside each other."""

from __future__ import annotations

from conformance.gpu.rows import Rows, Task, serve
from conformance.training.judge import as_json, judge
from conformance.training.plan import DTYPES, small_plan


def work(task: Task, rows: Rows) -> None:
    rows.plan(DTYPES)
    for dtype in DTYPES:
        if rows.left_s <= 0:
            return
        found = as_json([judge(task.subject, small_plan(dtype, device=task.device))])
        reasons = [f"{run['name']}: {reason}" for run in found["runs"] for reason in run["reasons"]]
        rows.add(dtype, "failed" if reasons else "agrees", "; ".join(reasons), **found)


if __name__ == "__main__":
    serve(work)
