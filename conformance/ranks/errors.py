"""What can become of a case on its ranks, as exceptions in the parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conformance.judge.library import LookupFailed, NotProvided
from conformance.ranks.collective_traces import Collective

_LAST_COLLECTIVES = 5


@dataclass(frozen=True)
class Failure:
    """One rank's end: it raised `kind` with `text`, or it died, with an exit code."""

    rank: int
    kind: str
    text: str
    traceback: str
    # CLOCK_MONOTONIC is the same for all processes of a machine, so the cause can be told from its echoes.
    when_ns: int
    exitcode: int | None = None
    # What a subject was asked for in vain: no fault of the case's.
    lookup: NotProvided | LookupFailed | None = None

    def __str__(self) -> str:
        if self.exitcode is not None:
            return f"rank {self.rank} died: {self.text}"
        return f"rank {self.rank} raised {self.kind}: {self.text}"


@dataclass(frozen=True)
class Scene:
    """What there was to see when a case ended badly; everything is by rank."""

    case: str
    world_size: int
    failures: Sequence[Failure] = ()  # in the order of their time: the first is the cause
    results: Mapping[int, str] = field(default_factory=dict)  # of ranks that ended well, shortened
    stacks: Mapping[int, str] = field(default_factory=dict)  # of ranks still inside
    outputs: Mapping[int, str] = field(default_factory=dict)  # the end of what each wrote
    traces: Sequence[Sequence[Collective]] = ()

    def __str__(self) -> str:
        parts = [f"case {self.case}, world size {self.world_size}"]
        parts += [f"-- {failure}\n{failure.traceback}".rstrip() for failure in self.failures]
        parts += [f"-- rank {rank} returned {result}" for rank, result in sorted(self.results.items())]
        parts += [
            f"-- rank {rank} was inside:\n{stack}".rstrip() for rank, stack in sorted(self.stacks.items())
        ]
        for rank, trace in enumerate(self.traces):
            if trace:
                last = "".join(f"\n  {call}" for call in trace[-_LAST_COLLECTIVES:])
                parts.append(f"-- rank {rank} issued {len(trace)} collectives, lastly:{last}")
        parts += [
            f"-- rank {rank} wrote, lastly:\n{text}".rstrip()
            for rank, text in sorted(self.outputs.items())
            if text
        ]
        return "\n".join(parts)


class RankFault(Exception):
    """A case did not come back whole. `scene` holds everything that was seen."""

    def __init__(self, summary: str, scene: Scene) -> None:
        super().__init__(f"{summary}\n{scene}")
        self.scene = scene


class RankRaised(RankFault):
    """A rank raised."""


class RankDied(RankFault):
    """A rank's process ended."""


class RankHung(RankFault):
    """Ranks were still inside their case at the deadline."""


class RanksDiverged(RankFault):
    """Ranks issued different collectives, which would have hung or mixed up their data."""


class PoolBroken(RuntimeError):
    """No fault of a case: the ranks could not be brought up."""
