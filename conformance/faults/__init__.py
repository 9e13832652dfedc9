"""Faults: subjects that are right but for one thing, each of which must turn the unmodified suite red.

    python -m conformance.faults                 every fault, injected into impl; prints and writes the kill matrix
    python -m conformance.faults --clauses       then whether each clause that was first to none can catch one
    python -m conformance.faults --subject torch the same faults, injected into torch
    python -m conformance.faults --list          the faults by name
    python -m conformance.faults --only scale    those whose name holds a word
    python -m conformance.faults --resume        those that an earlier run of the same commit was stopped before
    python -m conformance.faults --remember      and note what killed each in killers.json, for later runs

Two kinds, both named after a `+` in a subject's spec (`impl+ignore:amp.GradScaler(init_scale)`):
    generated  one for each parameter, method and getter of the public surface (`generated.py`)
    handmade   one for each bug that a real implementation once had (`handmade/`, at torch's paths); and for each
               of ours that no operator of `conformance.mutation` makes, such as one on one rank

The kill matrix goes to `report/kills.json`, where the next `ci/gate` finds it and draws it into its report. Ctrl-C ends
the command within seconds; what is known by then is written, marked as incomplete.

A worker collects the suite once; each fault is then judged in a fork of it. A fault counts as killed by the first test
that fails, and only if that test is green without the fault. Nothing tells the tests what was injected: only their
order follows, from the name that is broken and from what has killed it before, in the matrix at `--out` or else as
`killers.json` has it.
"""
