"""What earlier runs found out, with which a later one begins: `killers.json` and the matrix that lies at `--out`."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from conformance.faults.kills import Kills, read_kills
from conformance.faults.trials import fault_ids
from conformance.judge.clauses import HERE, all_clauses

_FILE = Path(__file__).parent / "killers.json"


@dataclass(frozen=True)
class Memory:
    """Of whatever commit and subject it is: what kills no longer costs its own time alone."""

    faults: dict[str, str]  # by fault the test that killed it
    clauses: dict[str, str]  # by clause that was the first to kill none a fault that its tests have killed

    def __or__(self, later: Memory) -> Memory:
        return Memory(self.faults | later.faults, self.clauses | later.clauses)


def known(out: Path) -> Memory:
    """What `remember` noted, and what the matrix at `out` says, which knows better."""
    with contextlib.suppress(ValueError):
        return noted() | _memory_of(Kills.of(read_kills(out)))
    return noted()


def remember(kills: Kills) -> None:
    """Note it beside what was noted before; a fault that survived keeps the killer that it had, if it is there."""
    both = asdict(still_there(noted() | _memory_of(kills)))
    _FILE.write_text(json.dumps(both, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def still_there(memory: Memory) -> Memory:
    """Without the faults, the clauses and the tests that are gone."""
    faults = set(fault_ids())
    return Memory(
        {name: test for name, test in memory.faults.items() if name in faults and _is_test(test)},
        {name: fault for name, fault in memory.clauses.items() if name in all_clauses() and fault in faults},
    )


def _is_test(nodeid: str) -> bool:
    file, _, function = nodeid.partition("[")[0].partition("::")
    found = HERE.parent / file
    return found.is_file() and f"def {function}(" in found.read_text(encoding="utf-8")


def _memory_of(kills: Kills) -> Memory:
    return Memory(
        faults={kill.fault: kill.nodeid for kill in kills.kills if kill.killed},
        clauses={row.clause: row.kills for row in kills.idle or [] if row.kills},
    )


def noted() -> Memory:
    """What `remember` has noted."""
    return Memory(**json.loads(_FILE.read_text(encoding="utf-8")))
