"""Happens-before analysis of a log of the operations that a host issued to streams.

The operations of one stream run in order, concurrently with the other streams and the host. Three rules order
operations of different streams. No operation runs before it was issued. A wait for an event ends after everything that
was issued to the event's stream before the event was recorded. A host that blocks on an event issues its next
operations after the event.

Two uses of a buffer must be ordered if one of them writes. The uses of a freed buffer must also be ordered with the
uses of the next buffer in its memory. A caching allocator reuses the memory for the next allocation on the same stream,
and does not check whether other streams still use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

# The stream of the host's own reads and writes.
HOST = "host"
# The home stream of buffers whose allocation is not in the log.
COMPUTE = "compute"


@dataclass(frozen=True)
class Operation:
    stream: str
    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Allocation:
    stream: str
    buffer: int


@dataclass(frozen=True)
class Free:
    """The host freed the buffer. Streams may still have pending work that uses it."""

    buffer: int


@dataclass(frozen=True)
class Record:
    stream: str
    event: int


@dataclass(frozen=True)
class Wait:
    stream: str
    event: int


@dataclass(frozen=True)
class HostBlock:
    """The host blocked until the event."""

    event: int


Entry = Operation | Allocation | Free | Record | Wait | HostBlock
# For each stream, how many of its operations are certainly complete.
Clock = dict[str, int]


def hazards(log: Iterable[Entry]) -> list[str]:
    """Return one sentence for each unordered pair of uses of the same memory, in the order of the log."""
    return _replayed(log).found


@dataclass(frozen=True)
class OrderedOperation:
    """An operation of a log, with everything that certainly runs before it."""

    index: int  # position in the log
    operation: Operation
    tick: int  # position in the operation's stream
    clock: Clock

    def comes_after(self, other: OrderedOperation) -> bool:
        """Return whether `other` surely runs before this operation."""
        return self.clock.get(other.operation.stream, 0) >= other.tick


def ordered_operations(log: Iterable[Entry]) -> list[OrderedOperation]:
    """Return the operations of a log in the order in which the host issued them."""
    return _replayed(log).operations


def _replayed(log: Iterable[Entry]) -> _Replay:
    replay = _Replay()
    for index, entry in enumerate(log):
        replay.follow(index, entry)
    return replay


@dataclass(frozen=True)
class _Use:
    stream: str
    tick: int
    name: str

    def is_done(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.tick

    def __str__(self) -> str:
        return f"{self.name} ({self.stream})"


@dataclass
class _Buffer:
    home: str = COMPUTE
    is_freed: bool = False
    # The last use on each stream. All earlier uses on the stream run before it.
    reads: dict[str, _Use] = field(default_factory=dict)
    writes: dict[str, _Use] = field(default_factory=dict)


class _Replay:
    def __init__(self) -> None:
        self.found: list[str] = []
        self.operations: list[OrderedOperation] = []
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}
        self._buffers: defaultdict[int, _Buffer] = defaultdict(_Buffer)
        self._freed_to: defaultdict[str, list[tuple[int, _Use]]] = defaultdict(list)

    def follow(self, index: int, entry: Entry) -> None:
        match entry:
            case Operation():
                self._operate(index, entry)
            case Allocation(stream, buffer):
                self._allocate(stream, buffer)
            case Free(buffer):
                self._free(buffer)
            case Record(stream, event):
                self._events[event] = dict(self._issue(stream))
            case Wait(stream, event):
                _advance(self._issue(stream), self._events[event])
            case HostBlock(event):
                _advance(self._clocks[HOST], self._events[event])

    def _issue(self, stream: str) -> Clock:
        clock = self._clocks[stream]
        _advance(clock, self._clocks[HOST])
        return clock

    def _operate(self, index: int, operation: Operation) -> None:
        clock = self._issue(operation.stream)
        tick = clock[operation.stream] = clock.get(operation.stream, 0) + 1
        self.operations.append(OrderedOperation(index, operation, tick, dict(clock)))
        use = _Use(operation.stream, tick, operation.name)
        for number in operation.reads:
            buffer = self._used(number, use)
            self._expect_done("reads", number, use, buffer.writes.values())
            buffer.reads[use.stream] = use
        for number in operation.writes:
            buffer = self._used(number, use)
            self._expect_done("writes", number, use, [*buffer.writes.values(), *buffer.reads.values()])
            buffer.writes[use.stream] = use

    def _used(self, number: int, use: _Use) -> _Buffer:
        buffer = self._buffers[number]
        if buffer.is_freed:
            self.found.append(f"{use} uses buffer {number} after it was freed")
        return buffer

    def _expect_done(self, action: str, number: int, use: _Use, earlier: Iterable[_Use]) -> None:
        clock = self._clocks[use.stream]
        self.found += [
            f"{use} {action} buffer {number} without waiting for {other}"
            for other in earlier
            if not other.is_done(clock)
        ]

    def _allocate(self, stream: str, number: int) -> None:
        clock = self._issue(stream)
        self.found += [
            f"buffer {number} may get the memory of buffer {freed} before {use} is done with it"
            for freed, use in self._freed_to.pop(stream, [])
            if not use.is_done(clock)
        ]
        self._buffers[number] = _Buffer(home=stream)

    def _free(self, number: int) -> None:
        buffer = self._buffers[number]
        buffer.is_freed = True
        for use in (*buffer.reads.values(), *buffer.writes.values()):
            self._freed_to[buffer.home].append((number, use))


def _advance(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)
