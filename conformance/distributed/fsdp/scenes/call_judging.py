"""Judgements of sequences of calls on a model sharded by `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.fully_shard_calls import ROOT, UnitCall, play
from conformance.distributed.fsdp.scenes.fully_shard_training import Sharding
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree, run_on_ranks
from conformance.distributed.fsdp.scenes.traffic import are_at_most
from conformance.distributed.fsdp.scenes.twins import RankOutcomes, Twins, values_of
from conformance.judge.deviations import does_as
from conformance.judge.library import Library
from conformance.ranks.collective_traces import Collective
from conformance.strategies.full_sharding import programs

Trace = Sequence[Collective]
LEAVES = Sharding()
FORWARD, BACKWARD, STEP, LOOK = UnitCall("forward"), UnitCall("backward"), UnitCall("step"), UnitCall("look")
TRAIN = (FORWARD, BACKWARD, STEP)


def setting(method: str, unit: int = ROOT, **arguments: Any) -> UnitCall:
    return UnitCall(method, unit, arguments)


def outcomes_of(
    twins: Twins, library: Library, calls: Sequence[UnitCall], *, sharding: Sharding = LEAVES, **how: Any
) -> RankOutcomes:
    return run_on_ranks(twins.pool, library, play, calls=calls, sharding=sharding, **how)


def played(
    twins: Twins,
    calls: Sequence[UnitCall],
    *,
    names_groups: bool = False,
    gathers_again: bool = True,
    **how: Any,
) -> tuple[list[Trace], list[Trace]]:
    """Compare the calls. They must send at most as much as torch's. Return the traces of both libraries' ranks.

    Args:
        names_groups: whether new ranks run the calls, because groups are named by their members, only once each.
        gathers_again: whether an evaluation may gather units that are unsharded, and whether what follows it may too.
    """
    outcomes, traces = [], []
    for library in (twins.reference, twins.subject):
        if names_groups:
            twins.pool.kill()
        outcomes.append(outcomes_of(twins, library, calls, **how))
        traces.append([list(trace) for trace in twins.pool.traces])
    assert_ranks_agree(*outcomes)
    values_of(outcomes[1])
    if not are_at_most(traces[1], traces[0]) and gathers_again:
        # Deviation fully_shard.written_after_evaluation: units kept through an evaluation may be gathered again.
        outcomes_of(twins, twins.reference, _resharded_around_evaluations(calls), **how)
        traces[0] = [list(trace) for trace in twins.pool.traces]
    assert are_at_most(traces[1], traces[0]), "; torch ".join(str([*map(reported, sent)]) for sent in traces)
    return traces[0], traces[1]


def _resharded_around_evaluations(calls: Sequence[UnitCall]) -> list[UnitCall]:
    reshards = [setting("reshard", unit) for unit in range(ROOT + 1)]
    return [step for call in calls for step in ([*reshards, call, *reshards] if call == LOOK else [call])]


def reported(trace: Trace) -> list[str]:
    return [str(call) for call in trace]


def assert_leaves(
    twins: Twins, calls: Sequence[UnitCall], like: Sequence[UnitCall], sharding: Sharding = LEAVES
) -> None:
    """Judge a deviation by other calls on torch's side.

    The result of the first call and the final state of the ranks must equal those of torch's ranks after `like`.
    """

    def probe(library: Library, calls: Sequence[UnitCall] = calls) -> list[Any]:
        return [
            outcome
            if outcome.raised is not None
            else replace(outcome, value=[outcome.value["seen"][0]["made"], outcome.value["held"]])
            for outcome in outcomes_of(twins, library, calls, sharding=sharding)
        ]

    expected = probe(twins.reference, like)
    twins.judge(probe, we_do=lambda result: does_as(expected, result))


def draw_program(twins: Twins, data: st.DataObject) -> tuple[Sharding, list[UnitCall]]:
    # On a single rank, torch divides twice: test_divide_factor_applies_once_on_single_rank.
    factors = (1.0, 2.0, 3.0) if twins.world_size > 1 else (1.0,)
    return data.draw(programs(twins.reference.distributed.fsdp.FSDPModule, factors))
