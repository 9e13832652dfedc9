"""Begin and end of all entries of a trace, each on its stream, and the memory in use meanwhile."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from conformance.simulator.cost.durations import kind_of
from conformance.simulator.cost.trace import MARK, Entry

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    stream: int
    begin: float
    end: float
    entry: Entry

    @property
    def kind(self) -> str:
        return kind_of(self.entry)


@dataclass
class Timeline:
    spans: list[Span] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    allocated: list[tuple[float, int]] = field(default_factory=list)  # host time, and bytes in use

    def between(self, begin: float, end: float) -> list[Span]:
        return [span for span in self.spans if span.end > begin and span.begin < end]


class _Memory:
    """Memory in use. Like with torch's allocator, freed memory stays in use until its recorded streams have ended."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.living: dict[int, Entry] = {}
        self.users: dict[int, set[int]] = collections.defaultdict(set)
        self.leaving: list[tuple[float, int]] = []
        self.in_use = 0

    def allocate(self, entry: Entry, host: float) -> None:
        while self.leaving and self.leaving[0][0] <= host:
            self.in_use -= heapq.heappop(self.leaving)[1]
        self.living[entry.number] = entry
        self.in_use += entry.writes
        self.timeline.allocated.append((host, self.in_use))

    def free(self, entry: Entry, clocks: dict[int, float]) -> None:
        memory = self.living.pop(entry.number)
        users = self.users.pop(entry.number, set()) - {memory.stream}
        if not users:
            self.in_use -= memory.writes
            return
        heapq.heappush(self.leaving, (max(clocks[user] for user in users), memory.writes))


def schedule(entries: Iterable[Entry], seconds: Callable[[Entry], float], host_s: float) -> Timeline:
    """Begin each task of a stream after the previous task, its waits and the call of the host."""
    timeline, host = Timeline(), 0.0
    clocks: dict[int, float] = collections.defaultdict(float)
    recorded: dict[int, float] = {}
    memory = _Memory(timeline)
    for entry in entries:
        stream = entry.stream
        match entry.kind:
            case "run":
                host += host_s
                begin = max(clocks[stream], host)
                clocks[stream] = begin + seconds(entry)
                timeline.spans.append(Span(stream, begin, clocks[stream], entry))
            case "record":
                recorded[entry.number] = clocks[stream]
            case "wait":
                clocks[stream] = max(clocks[stream], recorded.get(entry.number, 0.0))
            case "host_wait":
                host = max(host, recorded.get(entry.number, 0.0))
            case "allocate":
                memory.allocate(entry, host)
            case "free":
                if entry.number in memory.living:
                    memory.free(entry, clocks)
            case "use":
                memory.users[entry.number].add(stream)
            case _ if entry.kind == MARK:
                timeline.marks.append(host)
    return timeline


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, in order."""
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in merged(intervals))


@dataclass(frozen=True)
class StepCost:
    """Simulated cost of a step."""

    seconds: float
    computing_s: float
    communicating_s: float
    exposed_s: float  # communication while nothing computes
    allocated_bytes: int  # peak


def step_cost(timeline: Timeline) -> StepCost:
    """Return the cost of the last step, which is between the last two marks."""
    begin, end = timeline.marks[-2:]
    spans = timeline.between(begin, end)
    communication = [(span.begin, span.end) for span in spans if span.kind == "collective"]
    computation = [(span.begin, span.end) for span in spans if span.kind != "collective"]
    return StepCost(
        seconds=end - begin,
        computing_s=length(computation),
        communicating_s=length(communication),
        exposed_s=length(communication + computation) - length(computation),
        allocated_bytes=max((size for at, size in timeline.allocated if begin <= at <= end), default=0),
    )
