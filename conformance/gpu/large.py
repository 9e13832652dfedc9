"""Time steps of about a billion parameters beside torch's, and a copy of that size on the same device."""

from __future__ import annotations

import gc

from benchmarks.timing import Effort
from conformance.gpu.bandwidth import add_copy, limit_threads
from conformance.gpu.phase_rows import PhaseTask, Rows, serve
from conformance.gpu.steps import CALLS, add_compared

_SHAPES = {"cuda": "64x16m", "cpu": "100x1k"}
_DTYPES = ("float32", "bfloat16")
_EFFORT = Effort(pairs=9, least_pairs=5, budget_s=1.0)


def work(task: PhaseTask, rows: Rows) -> None:
    limit_threads(task.device)
    shapes = _SHAPES[task.device]
    rows.plan(f"{name} {shapes} {dtype}" for dtype in _DTYPES for name in ("copy", *CALLS))
    for dtype in _DTYPES:
        if rows.left_s <= 0:
            return
        gc.collect()  # an optimizer may hold the previous tensors in a cycle
        add_copy(rows, shapes, dtype, task.device)
        for call in CALLS:
            if rows.left_s <= 0:
                return
            add_compared(rows, call, shapes, dtype, task, _EFFORT)


if __name__ == "__main__":
    serve(work)
