"""Mutation testing: the strength of the suite against small random changes of torch's own source.

    python -m conformance.strength.mutation --sample 100 --seed 7                 a sample of each group in the copy
    python -m conformance.strength.mutation --group clipping --group autocast     only these groups
    python -m conformance.strength.mutation --subject impl                        mutants of impl
    python -m conformance.strength.mutation --show amp.grad_scaler:drop_wait:0    the changed lines of one mutant

A mutant is one change of the syntax tree of one file, made by an operator (`operators.py`). A sample is drawn at random
from all mutants of a group of files (`groups.py`), from each operator in turn. The spec of a mutant is
`impl+mutant:amp.grad_scaler:drop_wait:0`. It is judged by the tests of the profile quick that reach the changed line,
the fastest of each clause first, until a test is red that is green without the change. The command prints the share of
killed mutants with its 95% interval, and each survivor with its changed lines.

Three kinds of mutants do not count in the share. An *unreached* mutant changes a line that no test reaches on this
device. An *idle* mutant drops a wait that is an empty function on this device, such as those of streams and events of
`torch.cpu`, so that only another device can kill it. An *equivalent* mutant behaves the same according to a note in
`equivalent.toml`. If more than 10% have such notes, or the lines of a note do not exist, the command reports it and
ends with exit code 1.
"""
