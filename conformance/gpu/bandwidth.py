"""Memory bandwidth of each kernel, compared with a plain copy of as many bytes, the fastest possible transfer.

On CUDA the bandwidth is that of the time in which the device works. The host may take longer for a call.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import shapes_of, training
from benchmarks.timing import CudaStopwatch, HostStopwatch, Workload
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, serve
from impl import kernels
from impl.kernels import TensorList
from impl.kernels.rules import AdamRule

# Where latency is what counts, and where bandwidth is.
_SHAPES = {"cuda": ("1000x1k", "gpt2"), "cpu": ("100x1k",)}
_DTYPES = ("float32", "bfloat16")
_WARM_UPS, _CHUNKS, _CALLS = 3, 7, 10
# "torch" is torch's own operators, those that torch's modules call.
_BACKENDS: dict[str, Any] = {"impl": "auto", "torch": "torch"}


def calls_on(tensors: list[Tensor]) -> dict[str, tuple[int, Callable[[], object]]]:
    """Each kernel: how often it touches every element, and one call.

    The factor is -1: it keeps the sizes of the values, where 1 may be seen to change nothing.
    """
    device = tensors[0].device
    factor, found_inf = torch.tensor(-1.0, device=device), torch.zeros(1, device=device)
    # With a learning rate of 0 and without decay the parameters stay as they are.
    adamw = AdamRule(0.0, 0.9, 0.999, 1e-8, 0.0, amsgrad=False, maximize=False, decoupled=True)
    alike = [[torch.zeros_like(tensor) for tensor in tensors] for _ in range(3)]
    steps = [torch.ones((), device=device) for _ in tensors]
    parameters = kernels.Parameters(alike[0], alike[1:], steps)
    return {
        "unscale_": (2, lambda: kernels.unscale_(TensorList(tensors), factor, found_inf)),
        "scale_": (2, lambda: kernels.scale_(TensorList(tensors), factor)),
        "clamp_": (2, lambda: kernels.clamp_(TensorList(tensors), -1e3, 1e3)),
        "total_norm 2": (1, lambda: kernels.total_norm(TensorList(tensors), 2.0)),
        "total_norm inf": (1, lambda: kernels.total_norm(TensorList(tensors), math.inf)),
        "checked_norm": (1, lambda: kernels.checked_norm(TensorList(tensors), 2.0)),
        # Parameters and two moments read and written, gradients read.
        "fused_step_ AdamW": (
            7,
            lambda: kernels.fused_step_(adamw, parameters, TensorList(tensors), factor, found_inf[0]),
        ),
    }


def torchs_unscale(tensors: list[Tensor]) -> Callable[[], object]:
    """Return a call of torch's operator. With the backend "torch", `kernels.unscale_` also supports other dtypes."""
    factor, found_inf = (torch.tensor(value, device=tensors[0].device) for value in (-1.0, 0.0))
    return lambda: torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, factor)


def work(task: PhaseTask, rows: Rows) -> None:
    limit_threads(task.device)
    measures: dict[str, Callable[[], Result]] = {}
    for shapes, dtype in itertools.product(_SHAPES[task.device], _DTYPES):
        tensors = shapes, dtype, task.device
        measures[f"copy {shapes} {dtype}"] = partial(copied, *tensors)
        for call, owner in itertools.product(calls_on([torch.zeros(1)]), _BACKENDS):
            measures[f"{call} {owner} {shapes} {dtype}"] = partial(_measured, call, owner, *tensors)
    rows.run(measures)


def limit_threads(device: str) -> None:
    """Limit torch to one CPU thread, because threads that wait for a core are up to a thousand times slower."""
    if device == "cpu":
        torch.set_num_threads(1)


def _measured(name: str, owner: str, shapes: str, dtype: str, device: str) -> Result:
    times, call = _calls_of(owner, shapes, dtype, device)[name]
    moved_bytes, copy_s = times * _bytes_of(shapes, dtype), _copy_seconds(shapes, dtype, device)
    with kernels.backend(_BACKENDS[owner]):
        call_s = seconds(call, device)
        took_s = device_seconds(call, device)
    share = times * copy_s / (2 * took_s)
    says = f"{_in_words(moved_bytes, took_s)}, {share:.0%} of a copy's, {call_s * 1e6:.0f} µs a call"
    about = {"call": name, "whose": owner, "shapes": shapes, "dtype": dtype, "bytes": moved_bytes}
    return "measured", says, {**about, "seconds": took_s, "call_seconds": call_s, "share": share}


@lru_cache(maxsize=len(_BACKENDS))
def _calls_of(
    owner: str, shapes: str, dtype: str, device: str
) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return the calls on tensors of `training`, which are kept until the next list needs the memory."""
    parameters = training(shapes, dtype, device).parameters
    tensors = [parameter.grad for parameter in parameters if parameter.grad is not None]
    calls = calls_on(tensors)
    if owner == "torch":
        calls["unscale_"] = calls["unscale_"][0], torchs_unscale(tensors)
    return calls


def _bytes_of(shapes: str, dtype: str) -> int:
    return sum(map(math.prod, shapes_of(shapes))) * getattr(torch, dtype).itemsize


def copied(shapes: str, dtype: str, device: str) -> Result:
    """Return the row of a plain copy of as many bytes as the tensors have."""
    moved_bytes, copy_s = 2 * _bytes_of(shapes, dtype), _copy_seconds(shapes, dtype, device)
    about = {"call": "copy", "shapes": shapes, "dtype": dtype, "bytes": moved_bytes}
    return "measured", _in_words(moved_bytes, copy_s), {**about, "seconds": copy_s}


@cache
def _copy_seconds(shapes: str, dtype: str, device: str) -> float:
    source = torch.zeros(_bytes_of(shapes, dtype), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return device_seconds(lambda: target.copy_(source), device)


def seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds of one call: the median of several chunks of calls."""
    work, stopwatch = Workload(call), CudaStopwatch() if device == "cuda" else HostStopwatch()
    stopwatch.per_call(work, _WARM_UPS)
    return statistics.median(stopwatch.per_call(work, _CALLS) for _ in range(_CHUNKS))


def device_seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds in which the device works for one call: on CUDA without gaps between its kernels."""
    if device != "cuda":
        return seconds(call, device)
    for _ in range(_WARM_UPS):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_CALLS):
            call()
        torch.cuda.synchronize()
    on_device = (event for event in profiled.events() or [] if event.device_type == DeviceType.CUDA)
    return sum(event.time_range.elapsed_us() for event in on_device) / _CALLS / 1e6


def _in_words(moved_bytes: int, took_s: float) -> str:
    return f"{took_s * 1e6:.1f} µs, {moved_bytes / took_s / 1e9:.1f} GB/s"


if __name__ == "__main__":
    serve(work)
