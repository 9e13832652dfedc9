"""Graphs of a device: `torch.cuda.CUDAGraph` on CUDA, and `torch.accelerator.Graph` on other devices.

Work that is issued during a capture does not run. The graph records it with its numbers and the addresses of its
tensors, and each replay runs all of it in one launch.

- Work is captured in a side stream, because the current one may be the default stream, which cannot be captured.
- The side stream waits for the current one before the capture, and the current one for the side stream after it. torch
  writes the states of random generators when a capture begins. In torch 2.11 all graphs share these states, and graphs
  that still run read them.
- A replay runs in the current stream, in order with the other work there, and needs no waits.
- A capture only forbids unsafe calls in its own thread, so that threads of loaders and process groups can go on.
- `torch.cuda.graph` and a graph's own `with` are not used. They synchronise and empty the allocator's cache, so that
  the next gradients have other addresses and the graph is useless.
- Memory pools are not shared, because the captured work allocates nothing.
- CUDA frees a graph without references once its last replay has ended.

`capture(graph=True)` has run on one H100 (`docs/coverage.md`). Tests run it on the simulated accelerator
(`conformance/simulator`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    def replay(self) -> None:
        """Run the captured work in the current stream."""
        ...


class Graphs(Protocol):
    """Graph operations of a device. Streams have the type that `current_stream` and `side_stream` return."""

    def current_stream(self) -> Any: ...

    def side_stream(self) -> Any: ...

    def wait(self, stream: Any, other: Any) -> None:
        """Make later work of `stream` wait for all earlier work of `other`."""
        ...

    def capture(self, stream: Any, work: Callable[[], None]) -> Graph:
        """Record the work that `work` issues to `stream`."""
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
    """Return the graph operations of a device, or None if torch has no graphs for it."""
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
    except RuntimeError:  # the device has no graphs; torch has no other query
        return False
    return True


def capture_graph(graphs: Graphs, work: Callable[[], None]) -> Graph:
    """Return a graph of the work that `work` issues. Nothing of it has run yet."""
    current, side = graphs.current_stream(), graphs.side_stream()
    graphs.wait(side, current)
    graph = graphs.capture(side, work)
    graphs.wait(current, side)
    return graph
