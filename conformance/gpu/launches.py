"""Launches and waits of one call, counted with torch.profiler, of the subject and of torch.

The call runs in a steady state with filled caches. On CUDA the kernels and copies of the device are counted,
and the calls that made the host wait for it. On every device, torch's operators that Python called are counted, and
the values that the host read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import bench_amp_step, bench_clip_grad, bench_fused_amp_step, bench_grad_scaler
from benchmarks.common import member, training
from benchmarks.timing import Workload
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, serve

_MARK = "tandem measured"
_SHAPES = {"cuda": ("1000x1k", "gpt2"), "cpu": ("100x1k",)}
_WARM_UPS = 3
_COPIED = re.compile(r"^(Memcpy|Memset)")
_WAITS = re.compile(r"^cu\w*Synchronize")
_READS = "aten::_local_scalar_dense"


def captured_step(subject: str, shapes: str, device: str) -> Workload:
    """Return a step of an optimizer, which replays a CUDA graph if the subject is not torch."""
    data = training(shapes, "float32", device)
    optimizer = torch.optim.AdamW(data.parameters, fused=True)
    if subject != "torch":
        member(subject, "optim.capture")(optimizer, graph=True)
    return Workload(optimizer.step)


# Arguments: a subject and a name of shapes, then these words, then a device.
WORKLOADS: dict[str, tuple[Callable[..., Workload], tuple[str, ...]]] = {
    "unscale_": (bench_grad_scaler.unscale, ("float32", "kept")),
    "clip_grad_norm_": (bench_clip_grad.clip_grad_norm, ("float32", "clipped", "kept")),
    "whole AMP step": (bench_amp_step.amp_step, ("float32", "kept")),
    "fused AMP step": (bench_fused_amp_step.fused_amp_step, ("float32", "kept")),
    "captured step": (captured_step, ()),
}


def work(task: PhaseTask, rows: Rows) -> None:
    rows.run(
        {
            f"{call} {shapes} {subject}": partial(_counted, call, shapes, subject, task.device)
            for shapes in _SHAPES[task.device]
            for call in WORKLOADS
            for subject in (task.subject, "torch")
        }
    )


def _counted(call: str, shapes: str, subject: str, device: str) -> Result:
    make, words = WORKLOADS[call]
    counts = counted(make(subject, shapes, *words, device), device)
    says = ", ".join(f"{count} {counter}" for counter, count in counts.items() if count is not None)
    return "counted", says, {"counts": counts}


def counted(work: Workload, device: str) -> dict[str, int | None]:
    """Count the launches of one call. On the CPU nothing is launched, and the counts are None instead of 0."""
    cuda = device == "cuda"
    for _ in range(_WARM_UPS):
        _prepared(work)()
    call = _prepared(work)
    if cuda:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as profiled:
        with record_function(_MARK):
            call()
        # The profile must contain all kernels of the call. This wait is outside the mark and not counted.
        if cuda:
            torch.cuda.synchronize()
    return tally(list(profiled.events() or []), cuda)


def tally(events: Sequence[Any], cuda: bool) -> dict[str, int | None]:
    """Count the events of a profile that are inside the mark, and the device's work for them."""
    host = [event for event in events if event.device_type == DeviceType.CPU]
    mark = next(event for event in host if event.name == _MARK)
    marked = [event for event in host if _is_within(event, mark)]
    # A region that is marked on the host comes back as if the device had done something of that name.
    regions = {event.name for event in host}
    on_device = [
        event.name for event in events if event.device_type == DeviceType.CUDA and event.name not in regions
    ]
    copies = sum(bool(_COPIED.match(name)) for name in on_device)
    return {
        "kernels": len(on_device) - copies if cuda else None,
        "copies": copies if cuda else None,
        "synchronisations": sum(bool(_WAITS.match(event.name)) for event in marked) if cuda else None,
        "reads": sum(event.name == _READS for event in marked),
        "operators": sum(_is_outermost(event) for event in marked),
    }


def _prepared(work: Workload) -> Callable[[], object]:
    if work.prepare is not None:
        work.prepare()
    return work.call


def _is_within(event: Any, mark: Any) -> bool:
    return mark.time_range.start <= event.time_range.start and event.time_range.end <= mark.time_range.end


def _is_outermost(event: Any) -> bool:
    if not event.name.startswith("aten::"):
        return False
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith("aten::"):
        parent = parent.cpu_parent
    return parent is None


if __name__ == "__main__":
    serve(work)
