"""The kill matrix as the page shows it: which clause was the first to catch each fault."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Killer:
    name: str  # a clause, or a test that belongs to none
    faults: list[str]
    median_s: float


@dataclass(frozen=True)
class KillTable:
    subject: str
    commit: str
    began: str
    complete: bool  # otherwise it was stopped
    killed: list[dict[str, Any]]
    survivors: list[dict[str, Any]]
    killers: list[Killer]  # those that caught most first
    silent: list[str]  # clauses that were the first to catch nothing
    idle: list[dict[str, Any]] | None  # what each of them kills on its own; None if that was not asked
    median_s: float


def kill_matrix(report: dict[str, Any]) -> KillTable | None:
    """None when the run had no kill matrix."""
    found = report.get("kills")
    if not found:
        return None
    killed = [kill for kill in found["kills"] if kill["killed"]]
    caught: dict[str, list[dict[str, Any]]] = {}
    for kill in killed:
        caught.setdefault(kill["clause"] or kill["nodeid"] or kill["how"], []).append(kill)
    killers = [
        Killer(name, [kill["fault"] for kill in own], statistics.median(kill["seconds"] for kill in own))
        for name, own in sorted(caught.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    ]
    return KillTable(
        subject=found["subject"],
        commit=found["commit"],
        began=found["began"],
        complete=found["complete"],
        killed=killed,
        survivors=[kill for kill in found["kills"] if not kill["killed"]],
        killers=killers,
        silent=[clause["id"] for clause in report["clauses"] if clause["id"] not in caught],
        idle=found["idle"] and sorted(found["idle"], key=lambda row: (bool(row["kills"]), row["clause"])),
        median_s=statistics.median(kill["seconds"] for kill in killed) if killed else 0.0,
    )
