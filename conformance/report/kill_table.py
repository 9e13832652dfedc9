"""The kill matrix as the page shows it: the clause that was the first to kill each fault."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from conformance.strength.results import CLAUSES, FAULTS, KILLED


@dataclass(frozen=True)
class Killer:
    name: str  # clause, or test without clause
    faults: list[str]
    median_s: float


@dataclass(frozen=True)
class KillTable:
    table: dict[str, Any]  # the `Table` of the report
    killed: list[dict[str, Any]]
    survivors: list[dict[str, Any]]
    killers: list[Killer]  # ordered by the number of faults, largest first
    silent: list[str]  # clauses that were the first to kill no fault
    idle: list[dict[str, Any]]  # the same clauses with faults that they kill, if requested
    median_s: float


def kill_matrix(report: dict[str, Any]) -> KillTable | None:
    """Return the table of a report's kill matrix, or None if it has none."""
    kills = report.get("kills")
    if not kills:
        return None
    faults = [row for row in kills["rows"] if row["type"] == FAULTS]
    killed = [row for row in faults if row["outcome"] == KILLED]
    idle = [row for row in kills["rows"] if row["type"] == CLAUSES]
    caught: dict[str, list[dict[str, Any]]] = {}
    for kill in killed:
        caught.setdefault(kill["clause"] or kill["nodeid"] or kill["how"], []).append(kill)
    killers = [
        Killer(name, [kill["name"] for kill in own], statistics.median(kill["seconds"] for kill in own))
        for name, own in sorted(caught.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    ]
    return KillTable(
        table=kills,
        killed=killed,
        survivors=[row for row in faults if row["outcome"] != KILLED],
        killers=killers,
        silent=[clause["id"] for clause in report["clauses"] if clause["id"] not in caught],
        idle=sorted(idle, key=lambda row: (bool(row["fault"]), row["name"])),
        median_s=statistics.median(kill["seconds"] for kill in killed) if killed else 0.0,
    )
