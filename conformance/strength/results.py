"""The table of results that all measures write: a row for each fault, clause, mutant or run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FAULTS, CLAUSES, MUTANTS, RUNS = "faults", "clauses", "mutants", "runs"
# A clause has KILLED if it kills a fault, SURVIVED if it kills none, UNTESTED if none of its tests could run.
KILLED, SURVIVED, UNTESTED = "killed", "survived", "untested"
UNREACHED, EQUIVALENT = "unreached", "equivalent"  # mutants that do not count
GREEN, RED_RUN = "green", "red"


@dataclass(frozen=True)
class Row:
    name: str  # fault, clause, mutant, or seed of a run
    type: str  # FAULTS, CLAUSES, MUTANTS or RUNS
    outcome: str
    nodeid: str = ""  # the first red test
    clause: str = ""  # clause of that test
    how: str = ""  # failed, hang, crash, stale
    seconds: float = 0.0
    says: str = ""  # description of a bug, or details of the outcome
    thread: str = ""  # public report of a fault
    why: str = ""  # the reason on file for the outcome
    fault: str = ""  # the fault that a clause has killed
    tried: int = 0  # number of faults that a clause was tried with
    group: str = ""  # group of the mutated file

    @property
    def is_due(self) -> bool:
        """Whether a fault was killed or has a reason to survive, but not both, because such a reason is stale."""
        return self.outcome == UNTESTED or (self.outcome == KILLED) != bool(self.why)

    @property
    def text(self) -> str:
        """The outcome as the command prints it."""
        reason = f", reason: {self.why}" if self.why else ""
        if self.type == RUNS:
            return f"{self.outcome}, {self.says}"
        if self.outcome == SURVIVED:
            text = f"kills none of {self.tried}" if self.type == CLAUSES else "survived"
            return f"{text}{reason}" if reason else f"{text.upper()} {self.says}".strip()
        if self.outcome != KILLED:
            return f"{self.outcome}{reason}"
        by = f"killed by {self.clause or self.nodeid} ({self.how})"
        text = f"kills {self.fault}, the last of {self.tried} that were tried" if self.fault else by
        return f"{text}; STALE REASON: {self.why}" if reason else text


@dataclass
class Table:
    measure: str
    subject: str
    commit: str  # commit of the suite and of impl
    began: str
    settings: dict[str, Any] = field(default_factory=dict)  # seed, number of mutants and the like
    seconds: float = 0.0
    complete: bool = False  # False if the run was stopped
    rows: list[Row] = field(default_factory=list)

    def of(self, row_type: str) -> list[Row]:
        return [row for row in self.rows if row.type == row_type]


def with_places(rows: Iterable[Row], total: int) -> Iterator[tuple[str, Row]]:
    """Yield each row with its place among all rows, such as 3/20."""
    for number, row in enumerate(rows, start=1):
        yield f"{number}/{total}", row


def write_table(file: Path, table: Table) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(table), indent=1))


def read_table(file: Path, measure: str) -> Table:
    """Read a table of a measure that `write_table` has written.

    Raises:
        ValueError: the file does not exist or is not such a table.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        table = Table(**fields | {"rows": [Row(**row) for row in fields["rows"]]})
        if table.measure == measure:
            return table
        reported = f"is a table of {table.measure}"
    except OSError as error:
        raise ValueError(f"there is no table of {measure} at {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        reported = f"is no table of {measure}"
    raise ValueError(f"{file} {reported}; python -m conformance.strength {measure} writes one")
