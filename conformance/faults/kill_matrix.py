"""The kill matrix: what the suite made of each fault, as it is written to a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kill:
    """What the suite made of one fault."""

    fault: str
    killed: bool
    clause: str  # the clause whose test was the first to be red; empty if none was
    nodeid: str
    how: str  # failed, hang, crash, stale
    seconds: float
    says: str = ""
    thread: str = ""
    why: str = ""  # the reason in `survivors.toml`

    @property
    def is_due(self) -> bool:
        """Killed, or excused: a reason for a fault that is killed is stale."""
        return self.killed != bool(self.why)


@dataclass(frozen=True)
class IdleClause:
    """A clause that was the first to catch nothing, and whether it can catch anything."""

    clause: str
    tried: int  # faults
    kills: str = ""  # the first of them that its tests alone have killed
    nodeid: str = ""
    why: str = ""  # the reason in `idle_clauses.toml`
    asked: bool = True  # whether any of its tests could run

    @property
    def is_due(self) -> bool:
        return bool(self.kills) != bool(self.why)


@dataclass
class Kills:
    subject: str
    commit: str  # of the suite, and of impl
    began: str
    seconds: float = 0.0
    complete: bool = False  # otherwise it was stopped
    kills: list[Kill] = field(default_factory=list)
    idle: list[IdleClause] | None = None  # None if nobody asked

    @classmethod
    def of(cls, found: dict[str, Any]) -> Kills:
        """What `read_kills` has read."""
        idle = found["idle"] and [IdleClause(**row) for row in found["idle"]]
        return cls(**found | {"kills": [Kill(**row) for row in found["kills"]], "idle": idle})


def write_kills(file: Path, kills: Kills) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(kills), indent=1))


def read_kills(file: Path) -> dict[str, Any]:
    """A kill matrix as `write_kills` leaves it, for a report.

    Raises:
        ValueError: the file is not there, or is something else.
    """
    try:
        return asdict(Kills.of(json.loads(file.read_text(encoding="utf-8"))))
    except OSError as error:
        raise ValueError(f"there is no kill matrix at {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is no kill matrix; python -m conformance.faults writes one") from None
