"""Ranks for multi-process cases: real processes in a real process group, which stay up between cases.

    with RankPool(2) as pool:
        sums = pool.run("conformance.ranks.failing_programs:all_reduce", values=[[1.0, 2.0], [3.0, 4.0]])

Hypothesis and all assertions stay in the parent. A *case* is an importable function, named `module:function`. Each rank
calls it with a `Rank` and the same plain arguments, and the parent receives the results as a list by rank. A failed
assertion therefore never leaves a peer in a collective, and a failing multi-rank example shrinks like any other.

If something goes wrong in a rank, the parent raises, and the next case gets new ranks:
    RankRaised    a rank raised. The text has the first error, the later errors of its peers, and stacks of the others
    RankDied      a rank's process ended
    RankHung      ranks exceeded the deadline. The text has their Python stacks
    RanksDiverged ranks issued different collectives. The text compares them, without waiting for a hang
    NotProvided, LookupFailed   the judge's library raised it in a rank

`fixtures` has the pools for tests.
Linux only, because it uses the fork server, /proc and signals for closed pipes.
"""

from conformance.judge.rank_errors import PoolBroken, RankDied, RankFault, RankHung, RankRaised, RanksDiverged
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
