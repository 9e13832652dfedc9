"""Exceptions that `conformance.ranks` raises if a case fails on its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conformance.judge.library import LookupFailed, NotProvided

_LAST_COLLECTIVES = 5


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, which raised `kind` with `text` or died with an exit code."""

    rank: int
    kind: str
    text: str
    traceback: str
    # CLOCK_MONOTONIC is the same for all processes of a machine, so the first failure is the cause.
    when_ns: int
    exitcode: int | None = None
    # The lookup of a name in the subject that failed, which is not a fault of the case.
    lookup: NotProvided | LookupFailed | None = None

    def __str__(self) -> str:
        if self.exitcode is not None:
            return f"rank {self.rank} died: {self.text}"
        return f"rank {self.rank} raised {self.kind}: {self.text}"


@dataclass(frozen=True)
class FaultRecord:
    """The state of all ranks when a case failed. All fields are by rank."""

    case: str
    world_size: int
    failures: Sequence[Failure] = ()  # ordered by time, the cause first
    results: Mapping[int, str] = field(default_factory=dict)  # shortened results of successful ranks
    stacks: Mapping[int, str] = field(default_factory=dict)  # stacks of ranks that did not end
    outputs: Mapping[int, str] = field(default_factory=dict)  # the end of each rank's output
    traces: Sequence[Sequence[object]] = ()  # the collectives that each rank issued

    def __str__(self) -> str:
        parts = [f"case {self.case}, world size {self.world_size}"]
        parts += [f"-- {failure}\n{failure.traceback}".rstrip() for failure in self.failures]
        parts += [f"-- rank {rank} returned {result}" for rank, result in sorted(self.results.items())]
        parts += [
            f"-- rank {rank} was still running:\n{stack}".rstrip()
            for rank, stack in sorted(self.stacks.items())
        ]
        for rank, trace in enumerate(self.traces):
            if trace:
                last = "".join(f"\n  {call}" for call in trace[-_LAST_COLLECTIVES:])
                parts.append(f"-- rank {rank} issued {len(trace)} collectives, the last of them:{last}")
        parts += [
            f"-- the last output of rank {rank}:\n{text}".rstrip()
            for rank, text in sorted(self.outputs.items())
            if text
        ]
        return "\n".join(parts)


class RankFault(Exception):
    """Raised when a case fails on its ranks. `record` has the state of all ranks."""

    def __init__(self, summary: str, record: FaultRecord) -> None:
        super().__init__(f"{summary}\n{record}")
        self.record = record


class RankRaised(RankFault):
    """Raised when a rank raised."""


class RankDied(RankFault):
    """Raised when the process of a rank ended."""


class RankHung(RankFault):
    """Raised when ranks exceeded the deadline of their case."""


class RanksDiverged(RankFault):
    """Raised when ranks issued different collectives, which would hang or mix up data."""


class PoolBroken(RuntimeError):
    """Raised when ranks cannot be started, which is not the fault of a case."""
