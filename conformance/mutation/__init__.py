"""How strong the suite is against mistakes that nobody chose: small ones, made in torch's own source.

    python -m conformance.mutation --sample 100 --seed 7                 of each group, in the exact copy of torch
    python -m conformance.mutation --group clipping --group autocast     of these groups
    python -m conformance.mutation --subject impl                        the same mistakes in impl
    python -m conformance.mutation --show amp.grad_scaler:drop_wait:0    one mutant's lines

A mutant is one mistake in the syntax tree of one file (`operators.py` has the kinds, which take turns), drawn at random
from all that a group of files allows (`groups.py`). As a subject it is called `impl+mutant:amp.grad_scaler:drop_wait:0`
and is judged by the tests of profile quick that reach the mistaken line, each clause's quickest first, until one is red
that is green without it. The command prints the share that was killed, with its 95% interval, and each survivor with
its lines.

A mutant whose line no test reaches on this device is *unreached* and left out of the share. So is one that is *idle*:
it leaves out a wait that on this device is an empty function of torch's, as those of `torch.cpu`'s streams and events
are, so that only another device can tell. And so is one that `equivalent.toml` proves to do the same.
More than 10% of such proofs, or one whose lines are no longer there, is told and ends in exit code 1.
"""
