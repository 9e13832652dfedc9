"""Host time of a launch by torch's operator, by Triton's call and by the compiled kernel's own call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from benchmarks.timing import Workload
from conformance.gpu.bandwidth import seconds
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, serve
from conformance.gpu.steps import host_seconds

_LAUNCHES = 100


def work(task: PhaseTask, rows: Rows) -> None:
    rows.run({name: partial(_measured, cost, task.device) for name, cost in COSTS.items()})


def _measured(cost: Callable[[], float], device: str) -> Result:
    if device != "cuda" or find_spec("triton") is None:
        raise NotImplementedError("needs CUDA and Triton")
    cost_s = cost()
    return "measured", f"{cost_s * 1e6:.1f} µs", {"seconds": cost_s}


def _host_s_of_operator() -> float:
    factor = torch.ones((), device="cuda")
    return _host_s(lambda: factor.mul_(1.0))


def _host_s_of_triton() -> float:
    from conformance.gpu.tiny_kernel import launch  # noqa: PLC0415  needs Triton

    values, factor = torch.ones(8, device="cuda"), torch.ones((), device="cuda")
    return _host_s(lambda: launch(values, factor))


def _host_s_of_compiled() -> float:
    from conformance.gpu.tiny_kernel import launch, launch_compiled  # noqa: PLC0415  needs Triton

    values, factor = torch.ones(8, device="cuda"), torch.ones((), device="cuda")
    compiled = launch(values, factor)
    return _host_s(lambda: launch_compiled(compiled, values, factor))


def _host_s(launch: Callable[[], object]) -> float:
    """Return the host time of a launch, the mean of many."""

    def launches() -> None:
        for _ in range(_LAUNCHES):
            launch()

    launches()  # the first ones are slower
    return host_seconds(Workload(launches), "cuda") / _LAUNCHES


def _device_s_in_graph() -> float:
    factor = torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            factor.mul_(1.0)
    return seconds(graph.replay, "cuda") / _LAUNCHES


COSTS: dict[str, Callable[[], float]] = {
    "torch's operator, host": _host_s_of_operator,
    "Triton's call, host": _host_s_of_triton,
    "compiled kernel's call, host": _host_s_of_compiled,
    "a small kernel in a graph, device": _device_s_in_graph,
}


if __name__ == "__main__":
    serve(work)
