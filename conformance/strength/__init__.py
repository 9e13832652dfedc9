"""How strong the suite is: each planted fault is judged by the unmodified suite, which must turn red.

    python -m conformance.strength                 every fault, planted in impl; prints and writes the kill matrix
    python -m conformance.strength --clauses       then whether each clause that was first to none can catch one
    python -m conformance.strength --subject torch the same faults, planted in torch
    python -m conformance.strength --list          the faults by name
    python -m conformance.strength --only scale    those whose name holds a word
    python -m conformance.strength --resume        those that an earlier run of the same commit was stopped before
    python -m conformance.strength --remember      and note what killed each in killers.json, for later runs

The kill matrix goes to `report/kills.json`, where the next `ci/gate` finds it and draws it into its report. Ctrl-C ends
the command within seconds; what is known by then is written, marked as incomplete.

A worker collects the suite once; each fault is then judged in a fork of it. A fault counts as killed by the first test
that fails, and only if that test is green without the fault. Nothing tells the tests what was planted: only their order
follows, from the name that is broken and from what has killed it before, in the matrix at `--out` or else as
`killers.json` has it.
"""

from conformance.strength.kills import Idle, Kill, Kills, read_kills, write_kills
from conformance.strength.reasons import excuses, idle_reasons
from conformance.strength.trials import plant_ids

__all__ = ["Idle", "Kill", "Kills", "excuses", "idle_reasons", "plant_ids", "read_kills", "write_kills"]
