"""One owner of streams and events: what may run beside what, and which waits hold it together.

Streams have four *roles*. COMPUTE is the stream the user computes in. GATHER brings shards to the device, casts and
gathers them. REDUCE sums gradients over the ranks. In hybrid sharding ALL_REDUCE sums shards of gradients over
replicas, beside the next reduce-scatter.

What is written before it is read:

- GATHER waits for COMPUTE when an outermost forward or summoning begins, when the user asks for a gather between them,
  and when the user put another tensor in a parameter's place: an optimizer or the user may have written to the shards
  there. Before an outermost forward it waits for a user's event instead, if there is one. In a backward it waits only
  if version counters say that shards were written to since they were gathered, so that the first gathers run beside the
  end of the forward. A write to `.data` between a forward and its backward moves no counter: as in torch, gathers may
  miss it.
- COMPUTE waits for a unit's gather before it reads the unsharded buffer: in forward, in backward, summoned.
- REDUCE waits for COMPUTE, which copies in a unit's gradients, before it reads them. ALL_REDUCE waits for REDUCE before
  it reads the shard that REDUCE scattered, and REDUCE waits for ALL_REDUCE at the end of backward.
- COMPUTE waits for REDUCE at the end of backward, before `.grad` is shown; with parameters on the CPU the host waits
  for COMPUTE too. Of a backward that is not the last, REDUCE itself adds to `.grad`, from memory of its own: where
  nothing is sharded it takes a copy of the buffer.

What is read before it is written again, or its memory given away:

- GATHER waits for the last work that read a resharded unit before the unit's memory is freed. It is GATHER's own and
  goes to the next gather, so the unit that was resharded last keeps it meanwhile: the next one is gathered while that
  one still computes. Where gathers are limited, the host waits as well before it issues another.
- COMPUTE waits for a gather that nothing used when the unit is resharded, even where what was gathered stays for who
  will use it: what follows may write to the shards.
- GATHER of a root waits for what its units gathered by hand before there was one, on streams of their own.
- The host waits for GATHER before it may write to shards in pinned memory: at the end of an outermost forward and of
  `summon_full_params`, and when the user waits for a gather between forwards or reshards a module that was gathered.
- A shard that REDUCE scattered for ALL_REDUCE is REDUCE's memory. It is kept until REDUCE has waited for ALL_REDUCE.
- The buffer that gradients were copied into is COMPUTE's memory; it is kept until COMPUTE has waited for its reduction,
  which it does before a third one is kept, or at the end of backward.

What this rests on:

- Memory belongs to the stream that was current when it was allocated, by resizing a storage too, and goes back to that
  stream alone. `record_stream` is never called, so how much memory is used does not depend on how fast the device is.
- In autograd's hooks the current stream is that of the forward operator whose node is running; in the callback at the
  end of backward it is that of whoever called backward, which has waited for all that accumulated gradients.
- Waiting for a collective on a device holds up the current stream and not the host.

The third form of the owner records: `impl/distributed/fsdp/tests/recording_streams.py`.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

import torch


class StreamRole(Enum):
    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"


class Streams(Protocol):
    """What each form does. An event is what `record` returned; None stands for one that has passed."""

    is_async: bool

    def on(self, role: StreamRole) -> AbstractContextManager[Any]:
        """What is issued inside runs on the role's stream."""
        ...

    def record(self, role: StreamRole) -> Any:
        """An event for all that was issued to the role's stream so far."""
        ...

    def wait(self, role: StreamRole, event: Any) -> None:
        """What is issued to the role's stream from here on runs after the event."""

    def block(self, event: Any) -> None:
        """Hold up the host until the event."""


class OneStream:
    """For the CPU: everything runs in the order in which it is issued."""

    is_async = False
    _nothing = contextlib.nullcontext()

    def on(self, role: StreamRole) -> AbstractContextManager[Any]:
        del role
        return self._nothing

    def record(self, role: StreamRole) -> Any:
        del role

    def wait(self, role: StreamRole, event: Any) -> None: ...

    def block(self, event: Any) -> None: ...


class DeviceStreams:
    """For CUDA and whatever else torch.accelerator knows."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = {role: torch.Stream(device) for role in StreamRole if role is not StreamRole.COMPUTE}

    def on(self, role: StreamRole) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if role is StreamRole.COMPUTE else self._side[role]

    def record(self, role: StreamRole) -> torch.Event:
        event = torch.Event(self._device)
        event.record(self._stream(role))
        return event

    def wait(self, role: StreamRole, event: Any) -> None:
        if type(event) is torch.Event:
            event.wait(self._stream(role))
        elif event is not None:  # a user's, of a device module's class that takes no stream but its own
            with self.on(role):
                event.wait()

    def block(self, event: torch.Event | None) -> None:
        if event is not None:
            event.synchronize()

    def _stream(self, role: StreamRole) -> torch.Stream:
        if role is StreamRole.COMPUTE:
            return torch.accelerator.current_stream(self._device)
        return self._side[role]


def streams_for(device: torch.device) -> Streams:
    return OneStream() if device.type == "cpu" else DeviceStreams(device)


def shards_were_read(streams: Streams) -> None:
    """The host may write to shards in pinned memory: gathers have what they copy from them."""
    streams.block(streams.record(StreamRole.GATHER))


def shards_were_written(streams: Streams) -> None:
    """Gathers see what COMPUTE has written so far."""
    streams.wait(StreamRole.GATHER, streams.record(StreamRole.COMPUTE))
