"""Trace of a program's calls to the device. Nothing is computed: shapes are real, memory and numbers are not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from conformance import simulator
from conformance.simulator import control, device

BACKEND = "simshapes"
MARK = "mark"


@dataclass(frozen=True)
class Entry:
    """An entry of a trace, in the order of the program."""

    # run, record, wait, host_wait, allocate, free, use, and mark, which the tracer adds
    kind: str
    name: str = ""
    stream: int = 0
    number: int = 0  # an address: of memory, or of a recording of an event
    reads: int = 0  # bytes
    writes: int = 0
    # Sizes of an operator's tensors. The number of ranks of a collective.
    sizes: list[list[int]] | None = None


@dataclass(frozen=True)
class Trace:
    entries: list[Entry]
    reserved_bytes: int  # peak of the device's caching allocator


class Tracer:
    """Recorder of the trace."""

    def __init__(self, extension: ModuleType) -> None:
        self._extension = extension
        self._entries: list[Entry] = []

    def mark(self) -> None:
        """Wait for the device on the host, and record the moment."""
        simulator.synchronize()
        self.trace().entries.append(Entry(MARK))

    def trace(self) -> Trace:
        self._entries += [Entry(*fields) for fields in self._extension.take_trace()]
        return Trace(self._entries, device.max_memory_reserved())


@contextlib.contextmanager
def tracing(ranks: int) -> Iterator[Tracer]:
    """Context manager that traces rank 0 of `ranks`. The others do not exist and are assumed to act like it.

    Values that the host reads from the device are zero. A program whose shapes depend on data raises.
    """
    simulator.enable()
    extension = control.needed()
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND,
            lambda store, rank, size, timeout: extension.make_backend(
                FakeProcessGroup._create_internal(rank, size), store, list(range(size))
            ),
            devices=[simulator.NAME, "cpu"],
        )
    device.empty_cache()
    device.reset_peak_memory_stats()
    extension.trace_by_shapes_alone(True)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield Tracer(extension)
    finally:
        dist.destroy_process_group()
        extension.trace_by_shapes_alone(False)
        extension.take_trace()
        device.empty_cache()  # memory without real pages
