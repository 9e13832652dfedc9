"""Streams and events of the concurrent work of units, and the waits that order it.

Streams have four *roles*. COMPUTE is the stream the user computes in. GATHER brings shards to the device, casts and
gathers them. REDUCE sums gradients over the ranks. In hybrid sharding ALL_REDUCE sums shards of gradients over
replicas, concurrently with the next reduce-scatter.

Writes that must happen before reads:

- GATHER waits for COMPUTE when an outermost forward or summoning begins, when the user or another root requests a
  gather between them, and when the user has replaced a parameter's tensor, because an optimizer or the user may have
  written to the shards by then. Before an outermost forward it waits for the user's event instead, if there is one. In
  a backward it waits only if version counters say that shards were written to since they were gathered, so that the
  first gathers run concurrently with the end of the forward. A write to `.data` between a forward and its backward
  increments no counter. Gathers may miss it, like in torch.
- COMPUTE waits for a unit's gather before it reads the unsharded buffer: in forward, in backward, and summoned. If the
  user runs forwards of a unit on several streams, each of them waits.
- COMPUTE waits for the other streams of a unit's forwards, which compute gradients too, before the unit is resharded
  and its gradients are copied.
- REDUCE waits for COMPUTE, which copies in a unit's gradients, before it reads them. ALL_REDUCE waits for REDUCE
  before it reads the shard that REDUCE scattered, and REDUCE waits for ALL_REDUCE at the end of backward.
- COMPUTE waits for REDUCE at the end of backward, before `.grad` is published. With parameters on the CPU the host
  waits for COMPUTE too. After a backward that is not the last, REDUCE itself adds to `.grad`, in its own memory, unless
  hooks may have stepped the parameters on REDUCE. If nothing is sharded it copies the buffer.
- A loss that reads the sharded parameters adds to `.grad` on COMPUTE. So REDUCE waits for COMPUTE before it adds, and
  COMPUTE waits for REDUCE at the end of the next outermost forward.
- COMPUTE waits for REDUCE, too, when the user waits for gradients that a backward left open, before a scaler takes or
  returns the gradients of a microbatch, and after a failed backward, whose hooks may have stepped parameters.
- The host waits for the reduction of a unit, and the copy of its gradients, before a receiver reads them. By then all
  gathers that read the unit's shards have ended, so that the receiver may write to the shards.

Reads that must happen before memory is overwritten or given to others:

- GATHER waits for the last work that read a resharded unit, on each stream that was COMPUTE in a use, before the
  unit's memory is freed. The memory is GATHER's and goes to the next gather. So the unit that was resharded last keeps
  its memory, and the next one is gathered while that one still computes. If gathers are limited, the host waits as well
  before it issues another.
- COMPUTE waits for an unused gather when the unit is resharded, even if the gathered values stay for a later use,
  because the next work may write to the shards.
- GATHER of a root waits for the gathers that its units issued on the user's request before there was a root, on
  streams of their own.
- The host waits for GATHER before it may write to shards in pinned memory: at the end of an outermost forward and of
  `summon_full_params`, and when the user waits for a gather between forwards or reshards a module that was gathered.
- A shard that REDUCE scattered for ALL_REDUCE is REDUCE's memory. It is kept until REDUCE has waited for ALL_REDUCE.
- The buffer that gradients were copied into is COMPUTE's memory. It is kept until COMPUTE, or the stream that was
  COMPUTE then, has waited for its reduction: before a third buffer is kept, or at the end of backward.
- COMPUTE waits for REDUCE before gradients are copied in for a user's reduce-scatter, whose input buffer may be the
  same each time.

Assumptions:

- Memory belongs to the stream that was current when it was allocated, also by resizing a storage, and returns to that
  stream only. `record_stream` is called for gradients that COMPUTE reads, because a module's own streams, or COMPUTE of
  an earlier backward, may have allocated them. It does nothing if COMPUTE has. So memory usage does not depend on the
  speed of the device, unless work on other streams of the user allocates gradients.
- `record_stream` is called, too, for tensors that an all-gather extension creates beside the gathered ones, such as
  scales. GATHER allocates them, and graphs may free them while COMPUTE reads them.
- The same is done for memory that COMPUTE reads once and replaces: buffers that are cast, shards that the user has
  assigned other data to, and the post-forward shards.
- A module that computes on streams of its own computes with the unit's inputs there. Gradients that do not flow to an
  input of the unit may be copied before that stream has computed them.
- In autograd's hooks the current stream is that of the forward operator whose node is running. In the callback at the
  end of backward it is the stream of the caller of backward, which has waited for all streams that accumulated
  gradients.
- Waiting for a collective on a device blocks the current stream and not the host.

`conformance/selftests/test_simulator_sharded.py` shows that each of these waits is needed.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol

import torch


class StreamRole(Enum):
    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"


class DeviceEvent(Protocol):
    """A `torch.Event`, or a user's event of a device module's class."""

    def wait(self) -> object:
        """Make the current stream wait."""
        ...


class Streams:
    """Streams by role. These are of the CPU, where everything runs in the order in which it is issued.

    None is an event that has passed.
    """

    is_async = False
    _nothing: AbstractContextManager[object] = contextlib.nullcontext()

    def on(self, role: StreamRole) -> AbstractContextManager[object]:
        """Context manager whose work runs on the role's stream."""
        del role
        return self._nothing

    def record(self, role: StreamRole) -> torch.Event | None:
        """Return an event for all work on the role's stream so far."""
        del role
        return None

    def wait(self, role: StreamRole, event: DeviceEvent | None) -> None:
        """Make later work on the role's stream run after the event."""

    def wait_stream(self, role: StreamRole, other: StreamRole) -> None:
        """Make later work on the role's stream run after all work so far on the other role's."""

    def current(self) -> torch.Stream | None:
        """Return the stream that is COMPUTE now."""
        return None

    def record_in(self, stream: torch.Stream | None) -> torch.Event | None:
        """Return an event for all work so far on a stream that was COMPUTE."""
        del stream
        return None

    def wait_in(self, stream: torch.Stream | None, event: torch.Event | None) -> None:
        """Make later work on a stream that was COMPUTE run after the event."""

    def block(self, event: torch.Event | None) -> None:
        """Block the host until the event."""

    def block_until_shards_read(self) -> None:
        """Block the host until pending gathers have read the shards, so that it may write to pinned memory."""
        self.block(self.record(StreamRole.GATHER))


class DeviceStreams(Streams):
    """Streams of CUDA and other devices that torch.accelerator supports."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = {role: torch.Stream(device) for role in StreamRole if role is not StreamRole.COMPUTE}

    def on(self, role: StreamRole) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if role is StreamRole.COMPUTE else self._side[role]

    def record(self, role: StreamRole) -> torch.Event:
        return self.record_in(self._stream(role))

    def wait(self, role: StreamRole, event: DeviceEvent | None) -> None:
        if type(event) is torch.Event:
            event.wait(self._stream(role))
        # A user's event of a device module's class only takes the module's own streams.
        elif event is not None:
            with self.on(role):
                event.wait()

    def wait_stream(self, role: StreamRole, other: StreamRole) -> None:
        self._stream(role).wait_stream(self._stream(other))

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def record_in(self, stream: torch.Stream | None) -> torch.Event:
        event = torch.Event(self._device)
        event.record(stream)
        return event

    def wait_in(self, stream: torch.Stream | None, event: torch.Event | None) -> None:
        if stream is not None and event is not None:
            event.wait(stream)

    def block(self, event: torch.Event | None) -> None:
        if event is not None:
            event.synchronize()

    def _stream(self, role: StreamRole) -> torch.Stream:
        return self.current() if role is StreamRole.COMPUTE else self._side[role]


def streams_for(device: torch.device) -> Streams:
    return Streams() if device.type == "cpu" else DeviceStreams(device)
