"""One owner of streams and events: what may run beside what, and which waits hold it together.

Work runs in three *lanes*. COMPUTE is the stream the user computes in. GATHER brings shards to the device, casts and
gathers them. REDUCE sums gradients over the ranks. The waits:

- GATHER waits for COMPUTE when an iteration begins, since the optimizer wrote the shards there.
- COMPUTE waits for a unit's gather before its forward and before its backward.
- GATHER waits for the COMPUTE work before a release, when it is to fill storage again; where gathers are limited, the
  host waits too, so that at most two units are whole.
- REDUCE waits for COMPUTE before it reads a unit's gradients; their buffer is kept until COMPUTE has waited for REDUCE.
- COMPUTE waits for REDUCE at the end of backward, since the optimizer reads the gradients there.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

import torch


class Lane(Enum):
    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"


class Streams(Protocol):
    """What each form does. An event is what `record` returned."""

    is_async: bool

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """What is issued inside runs in the lane."""
        ...

    def record(self, lane: Lane) -> Any:
        """An event for all that was issued to the lane so far."""
        ...

    def wait(self, lane: Lane, event: Any) -> None:
        """What is issued to the lane from here on runs after the event."""
        ...

    def block(self, event: Any) -> None:
        """Hold up the host until the event."""
        ...


class OneLane:
    """For the CPU: everything runs in the order in which it is issued."""

    is_async = False
    _nothing = contextlib.nullcontext()

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        del lane
        return self._nothing

    def record(self, lane: Lane) -> Any:
        del lane

    def wait(self, lane: Lane, event: Any) -> None: ...

    def block(self, event: Any) -> None: ...


class DeviceStreams:
    """For CUDA and whatever else torch.accelerator knows."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = {lane: torch.Stream(device) for lane in (Lane.GATHER, Lane.REDUCE)}

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if lane is Lane.COMPUTE else self._side[lane]

    def record(self, lane: Lane) -> torch.Event:
        event = torch.Event(self._device)
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: torch.Event | None) -> None:
        if event is not None:
            event.wait(self._stream(lane))

    def block(self, event: torch.Event | None) -> None:
        if event is not None:
            event.synchronize()

    def _stream(self, lane: Lane) -> torch.Stream:
        if lane is Lane.COMPUTE:
            return torch.accelerator.current_stream(self._device)
        return self._side[lane]


def streams_for(device: torch.device) -> Streams:
    return OneLane() if device.type == "cpu" else DeviceStreams(device)
