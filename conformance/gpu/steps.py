"""The calls of a mixed-precision step beside torch's, by turns, on lists from one tensor to GPT-2's.

The phase `speed` times many more cases, one ratio each. These rows also say what the host spends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import bench_amp_step, bench_clip_grad, bench_fused_amp_step, bench_grad_scaler
from benchmarks.timing import Effort, HostStopwatch, Paired, Workload, by_turns
from conformance.gpu.bandwidth import limit_threads
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, serve

_SHAPES = {"cuda": ("1x1k", "4x1k", "16x1k", "100x1k", "1000x1k"), "cpu": ("1x1k", "16x1k")}
_OF_MODEL = [("gpt2", "float32"), ("gpt2", "bfloat16")]
_EFFORT = Effort(pairs=30, least_pairs=9, budget_s=0.3)
_HOST_CALLS = 10
_FOREACH = partial(bench_fused_amp_step.fused_amp_step, implementation="foreach")

# Arguments: a subject, a name of shapes and a dtype, then these words, then a device.
CALLS: dict[str, tuple[Callable[..., Workload], tuple[str, ...]]] = {
    "fused_step": (bench_fused_amp_step.fused_amp_step, ("kept",)),
    "four calls": (bench_amp_step.amp_step, ("kept",)),
    "unscale_": (bench_grad_scaler.unscale, ("kept",)),
    "clip_grad_norm_": (bench_clip_grad.clip_grad_norm, ("clipped", "kept")),
}


def work(task: PhaseTask, rows: Rows) -> None:
    limit_threads(task.device)
    lists = [(shapes, "float32") for shapes in _SHAPES[task.device]]
    lists += _OF_MODEL if task.device == "cuda" else []
    rows.run(
        {
            f"{call} {shapes} {dtype}": partial(measured, call, shapes, dtype, task, _EFFORT)
            for shapes, dtype in lists
            for call in CALLS
        }
    )


def measured(call: str, shapes: str, dtype: str, task: PhaseTask, effort: Effort) -> Result:
    values = compared(call, shapes, dtype, task, effort)
    return "measured", _in_words(values), {"call": call, "shapes": shapes, "dtype": dtype, **values}


def compared(call: str, shapes: str, dtype: str, task: PhaseTask, effort: Effort) -> dict[str, Any]:
    """Return times, host times and launches of the subject and of torch's fastest implementation, which is fused."""
    make, words = CALLS[call]
    subject, torchs = (
        make(library, shapes, dtype, *words, task.device) for library in (task.subject, "torch")
    )
    references = [torchs]
    if call == "fused_step":
        # foreach rounds bfloat16 more often than the others, so its values are not compared.
        references.append(replace(_FOREACH("torch", shapes, dtype, *words, task.device), effect=None))
    paired = by_turns(subject, references, task.device, effort)
    return {
        **times_of(paired[0]),
        "ratio_to_foreach": paired[1].ratio if len(paired) > 1 else None,
        "host_seconds": host_seconds(subject, task.device),
        "torch_host_seconds": host_seconds(torchs, task.device),
    }


def times_of(paired: Paired) -> dict[str, float]:
    times = {"ratio": paired.ratio, "low": paired.low, "high": paired.high}
    return {**times, "seconds": paired.subject_s, "torch_seconds": paired.reference_s}


def host_seconds(work: Workload, device: str) -> float:
    """Return the host time of one call on an idle device, in seconds."""

    def prepare() -> None:
        if work.prepare is not None:
            work.prepare()
        if device == "cuda":
            torch.cuda.synchronize()

    return HostStopwatch().per_call(replace(work, prepare=prepare), _HOST_CALLS)


def _in_words(values: dict[str, Any]) -> str:
    text = (
        f"{values['ratio']:.3f} × torch ({values['seconds'] * 1e6:.0f} and {values['torch_seconds'] * 1e6:.0f} µs), "
        f"host {values['host_seconds'] * 1e6:.0f} and {values['torch_host_seconds'] * 1e6:.0f} µs"
    )
    if values["ratio_to_foreach"] is not None:
        text += f", {values['ratio_to_foreach']:.3f} × foreach"
    return text


if __name__ == "__main__":
    serve(work)
