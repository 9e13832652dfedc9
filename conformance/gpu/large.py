"""Time steps of about a billion parameters beside torch's, and a copy of that size on the same device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

from benchmarks.timing import Effort
from conformance.gpu.bandwidth import copied, limit_threads
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, serve
from conformance.gpu.steps import CALLS, measured

_SHAPES = {"cuda": "64x16m", "cpu": "100x1k"}
_DTYPES = ("float32", "bfloat16")
_EFFORT = Effort(pairs=9, least_pairs=5, budget_s=1.0)


def work(task: PhaseTask, rows: Rows) -> None:
    limit_threads(task.device)
    shapes = _SHAPES[task.device]
    measures: dict[str, Callable[[], Result]] = {}
    for dtype in _DTYPES:
        measures[f"copy {shapes} {dtype}"] = partial(_copied, shapes, dtype, task.device)
        for call in CALLS:
            measures[f"{call} {shapes} {dtype}"] = partial(measured, call, shapes, dtype, task, _EFFORT)
    rows.run(measures)


def _copied(shapes: str, dtype: str, device: str) -> Result:
    gc.collect()  # an optimizer may hold the previous tensors in a cycle
    return copied(shapes, dtype, device)


if __name__ == "__main__":
    serve(work)
