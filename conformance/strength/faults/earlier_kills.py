"""Results of earlier runs that speed up a later one: `killers.json` and the kill matrix at `--out`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from conformance.judge.clauses import is_test
from conformance.strength.faults.trials import fault_ids
from conformance.strength.results import CLAUSES, FAULTS, KILLED, Table, read_table

_FILE = Path(__file__).parent / "killers.json"
_LONG_S = 5.0  # limit below which the usual order finds the killer


@dataclass(frozen=True)
class EarlierKills:
    """Earlier kills of any commit and subject. An outdated entry only costs the time of its test."""

    faults: dict[str, str]  # test that killed each fault
    clauses: dict[str, str] = field(default_factory=dict)  # a fault that each clause has killed


def load_earlier_kills(out: Path) -> EarlierKills:
    """Return the kills of `killers.json` and of the matrix at `out`, which takes precedence."""
    try:
        table = read_table(out, "faults")
    except ValueError:
        return EarlierKills(read_killers())
    faults = {row.name: row.nodeid for row in table.of(FAULTS) if row.outcome == KILLED}
    return EarlierKills(
        read_killers() | faults, {row.name: row.fault for row in table.of(CLAUSES) if row.fault}
    )


def remember(table: Table) -> None:
    """Record the tests that killed slow faults. A fault that survived keeps its recorded killer, if that exists."""
    before = read_killers()
    killed = [row for row in table.of(FAULTS) if row.outcome == KILLED]
    now = {row.name: row.nodeid for row in killed if row.seconds > _LONG_S or row.name in before}
    faults_of: dict[str, list[str]] = {}
    for fault, test in sorted(without_removed(before | now).items()):
        faults_of.setdefault(test, []).append(fault)
    lines = (f"{json.dumps(test)}: {json.dumps(faults)}" for test, faults in sorted(faults_of.items()))
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def without_removed(killers: dict[str, str]) -> dict[str, str]:
    """Return `killers` without faults and tests that do not exist any more."""
    faults = set(fault_ids())
    return {name: test for name, test in killers.items() if name in faults and is_test(test)}


def read_killers() -> dict[str, str]:
    """Return the test that killed each fault, from `killers.json`."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    return {fault: test for test, faults in rows.items() for fault in faults}
