"""What earlier runs found out, with which a later one begins: `killers.json` and the matrix that lies at `--out`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from conformance.faults.kill_matrix import Kills, read_kills
from conformance.faults.trials import fault_ids
from conformance.judge.clauses import HERE

_FILE = Path(__file__).parent / "killers.json"
_LONG_S = 5.0  # a fault that is killed sooner needs no memory: the order of the tests finds its killer


@dataclass(frozen=True)
class EarlierKills:
    """Of whatever commit and subject it is: what kills no longer costs its own time alone."""

    faults: dict[str, str]  # by fault the test that killed it
    clauses: dict[str, str] = field(default_factory=dict)  # by clause a fault that its tests have killed


def known(out: Path) -> EarlierKills:
    """What `remember` noted, and what the matrix at `out` says, which knows better."""
    try:
        kills = Kills.of(read_kills(out))
    except ValueError:
        return EarlierKills(noted())
    clauses = {row.clause: row.kills for row in kills.idle or [] if row.kills}
    return EarlierKills(noted() | {kill.fault: kill.nodeid for kill in kills.kills if kill.killed}, clauses)


def remember(kills: Kills) -> None:
    """Note what took long to be killed; a fault that survived keeps the killer that it had, if it is there."""
    before = noted()
    long = {kill.fault for kill in kills.kills if kill.seconds > _LONG_S} | before.keys()
    now = {kill.fault: kill.nodeid for kill in kills.kills if kill.killed and kill.fault in long}
    faults_of: dict[str, list[str]] = {}
    for fault, test in sorted(still_there(before | now).items()):
        faults_of.setdefault(test, []).append(fault)
    lines = (f"{json.dumps(test)}: {json.dumps(faults)}" for test, faults in sorted(faults_of.items()))
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def still_there(killers: dict[str, str]) -> dict[str, str]:
    """Without the faults and the tests that are gone."""
    faults = set(fault_ids())
    return {name: test for name, test in killers.items() if name in faults and _is_test(test)}


def _is_test(nodeid: str) -> bool:
    file, _, function = nodeid.partition("[")[0].partition("::")
    found = HERE.parent / file
    return found.is_file() and f"def {function}(" in found.read_text(encoding="utf-8")


def noted() -> dict[str, str]:
    """By fault the test that killed it, as `remember` has noted."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    return {fault: test for test, faults in rows.items() for fault in faults}
