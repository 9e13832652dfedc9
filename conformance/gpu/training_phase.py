"""The gate's training runs, with torch's parts and with the subject's, beside each other."""

from __future__ import annotations

from functools import partial

from conformance.gpu.phase_rows import PhaseTask, Result, Rows, serve
from conformance.training.config import DTYPES, small_config
from conformance.training.judge import as_json, judge


def work(task: PhaseTask, rows: Rows) -> None:
    rows.run({dtype: partial(_judged, dtype, task) for dtype in DTYPES})


def _judged(dtype: str, task: PhaseTask) -> Result:
    judged = as_json([judge(task.subject, small_config(dtype, device=task.device))])
    reasons = [f"{run['name']}: {reason}" for run in judged["runs"] for reason in run["reasons"]]
    return "failed" if reasons else "agrees", "; ".join(reasons), judged


if __name__ == "__main__":
    serve(work)
