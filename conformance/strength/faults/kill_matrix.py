"""The kill matrix: the result of the suite for each fault, and its file format."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kill:
    """The result of the suite for one fault."""

    fault: str
    killed: bool
    clause: str  # clause of the first red test, or empty
    nodeid: str
    how: str  # failed, hang, crash, stale
    seconds: float
    says: str = ""
    thread: str = ""
    why: str = ""  # the reason in `survivors.toml`

    @property
    def is_due(self) -> bool:
        """Whether the fault was killed or has a reason to survive, but not both, because such a reason is stale."""
        return self.killed != bool(self.why)


@dataclass(frozen=True)
class IdleClause:
    """A clause that was the first to kill no fault, and a fault that it kills on its own, if there is one."""

    clause: str
    tried: int  # number of faults
    kills: str = ""  # the first fault that its own tests killed
    nodeid: str = ""
    why: str = ""  # the reason in `idle_clauses.toml`
    could_run: bool = True  # whether any of its tests could run

    @property
    def is_due(self) -> bool:
        return bool(self.kills) != bool(self.why)


@dataclass
class Kills:
    subject: str
    commit: str  # commit of the suite and of impl
    began: str
    seconds: float = 0.0
    complete: bool = False  # False if the run was stopped
    kills: list[Kill] = field(default_factory=list)
    idle: list[IdleClause] | None = None  # present if requested

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Kills:
        """Return the kill matrix that `read_kills` has read."""
        idle = fields["idle"] and [IdleClause(**row) for row in fields["idle"]]
        return cls(**fields | {"kills": [Kill(**row) for row in fields["kills"]], "idle": idle})


def write_kills(file: Path, kills: Kills) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(kills), indent=1))


def read_kills(file: Path) -> dict[str, Any]:
    """Read a kill matrix that `write_kills` has written, for a report.

    Raises:
        ValueError: the file does not exist or is not a kill matrix.
    """
    try:
        return asdict(Kills.of(json.loads(file.read_text(encoding="utf-8"))))
    except OSError as error:
        raise ValueError(f"there is no kill matrix at {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file} is not a kill matrix; python -m conformance.strength.faults writes one"
        ) from None
