"""Ranks to run multi-process cases on: real processes in a real process group, kept warm, never waited for in vain.

    with RankPool(2) as pool:
        sums = pool.run("conformance.ranks.cases:all_reduce", values=[[1.0, 2.0], [3.0, 4.0]])

Hypothesis and every assertion stay in the parent. A *case* is an importable function, named `module:function`; each
rank calls it with a `Rank` and the same plain arguments, and what it returns comes back as data, one item a rank. So a
failed assertion never leaves a peer in a collective, and a failing multi-rank example shrinks like any other.

What goes wrong in a rank is an exception in the parent, and the ranks are made anew for the next case:
    RankRaised    a rank raised; the first one to do so, the echoes of its peers, and where the others were stuck
    RankDied      a rank's process ended
    RankHung      ranks passed the deadline; with the Python stacks of those inside
    RanksDiverged two ranks issued different collectives, reported at once as a comparison rather than as a hang
    NotProvided, LookupFailed   as the judge's library raised them, where a rank asked for a name in vain

`fixtures` gives tests their pools, `python -m conformance.ranks --faults 200` shows that nothing is left behind.
Linux only: it builds on the fork server, on /proc and on signals for lost pipes.
"""

from conformance.ranks.errors import PoolBroken, RankDied, RankFault, RankHung, RankRaised, RanksDiverged
from conformance.ranks.pool import RankPool, backend_for
from conformance.ranks.process import Rank

__all__ = [
    "PoolBroken",
    "Rank",
    "RankDied",
    "RankFault",
    "RankHung",
    "RankPool",
    "RankRaised",
    "RanksDiverged",
    "backend_for",
]
