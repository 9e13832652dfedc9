"""Faults: correct subjects with one injected bug each, which the unmodified suite must detect.

    python -m conformance.strength.faults                 inject every fault into impl; print and write the kill matrix
    python -m conformance.strength.faults --clauses       also for each clause that was the first to kill none
    python -m conformance.strength.faults --subject torch inject the faults into torch
    python -m conformance.strength.faults --list          list the faults
    python -m conformance.strength.faults --only scale    only faults whose name contains a word
    python -m conformance.strength.faults --resume        only faults that a stopped run of the commit did not judge
    python -m conformance.strength.faults --remember      also record the killing tests in killers.json, for later runs

There are two types of faults, both named after a `+` in a subject's spec (`impl+ignore:amp.GradScaler(init_scale)`):
    generated  one for each parameter, method and getter of the public surface (`generated.py`)
    handmade   one for each bug that a real implementation once had (`handmade/`, at torch's paths), and for each bug
               of ours that no operator of `conformance.strength.mutation` makes, such as a bug on one rank

The kill matrix is written to `report/kills.json`, and the next `ci/gate` includes it in its report. Ctrl-C ends the
command within seconds and writes what is known until then, marked as incomplete.

A worker collects the suite once, and each fault is judged in a fork of it. A fault is killed by the first test that
fails, and only if that test passes without the fault. The tests do not know what was injected. Only their order depends
on the broken name and on what killed the fault before, according to the matrix at `--out` or else `killers.json`.
"""
