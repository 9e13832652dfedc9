"""Graphs of a device: CUDA's own on CUDA, which torch 2.13 gives no others, and `torch.accelerator.Graph` elsewhere.

What is issued while a graph is captured does not run. The graph keeps it with the numbers it was given and the
addresses of its tensors, and each replay runs all of it, for one launch.

- Work is captured in a side stream, since the current one may be the default stream, which cannot be captured.
- The side stream waits for the current one before, and the current one for it after: when a capture begins torch writes
  the states of random generators, which in torch 2.11 all graphs share and those still running read.
- A replay runs in the stream that is current, after what was issued there and before what will be: no waits.
- A capture forbids unsafe calls to its own thread alone, so that the threads of loaders and process groups go on.
- Neither `torch.cuda.graph` nor a graph's own `with` is used: they wait for the device and empty the allocator's cache,
  after which the next gradients lie elsewhere and what was captured is of no use.
- No memory pool is shared: what is captured here allocates nothing.
- A graph goes when nothing refers to it; one that runs at that time is freed by CUDA when it is through.

None of this has run on a GPU yet; it runs on the simulated accelerator (`conformance/simulator`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    def replay(self) -> None:
        """Run what was captured, in the current stream."""
        ...


class Graphs(Protocol):
    """What a device does for graphs. A stream is whatever `current_stream` and `side_stream` return."""

    def current_stream(self) -> Any: ...

    def side_stream(self) -> Any: ...

    def wait(self, stream: Any, other: Any) -> None:
        """What is issued to `stream` from here on runs after what `other` was given so far."""
        ...

    def capture(self, stream: Any, work: Callable[[], None]) -> Graph:
        """Keep what `work` issues, in that stream."""
        ...


class CudaGraphs:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        stream.wait_stream(other)

    def capture(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


class AcceleratorGraphs:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def side_stream(self) -> torch.Stream:
        return torch.Stream(self._device)

    def wait(self, stream: torch.Stream, other: torch.Stream) -> None:
        stream.wait_stream(other)

    def capture(self, stream: torch.Stream, work: Callable[[], None]) -> torch.accelerator.Graph:
        graph = torch.accelerator.Graph(capture_error_mode="thread_local")
        with stream:
            graph.capture_begin()
            try:
                work()
            finally:
                graph.capture_end()
        return graph


def graphs_for(device: torch.device) -> Graphs | None:
    """None for a device that has no graphs, or none that this torch knows of."""
    if device.type == "cuda":
        return CudaGraphs(device)
    return AcceleratorGraphs(device) if _has_accelerator_graphs(device.type) else None


@functools.cache
def _has_accelerator_graphs(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type or not hasattr(torch.accelerator, "Graph"):
        return False
    try:
        torch.accelerator.Graph()
    except RuntimeError:  # torch has no other answer for a device that brings none
        return False
    return True


def captured(graphs: Graphs, work: Callable[[], None]) -> Graph:
    """A graph of what `work` issues; nothing of it has run yet."""
    current, side = graphs.current_stream(), graphs.side_stream()
    graphs.wait(side, current)
    graph = graphs.capture(side, work)
    graphs.wait(current, side)
    return graph
