"""no_sync, and accumulation with and without it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp import hook_cases, no_sync_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import assert_probes_agree, assert_trains, share_of_examples
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankPool
from conformance.strategies.sharding import steps, trainings

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
accumulating = steps(orders=("in turn", "no_sync", "no_sync"), befores=("",)).filter(
    lambda step: step.forwards > 1
)


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.accumulates")
@pytest.mark.parametrize("strategy", STRATEGIES)
@share_of_examples(0.2)
@given(data=st.data())
def test_accumulates_with_and_without_it(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, data: st.DataObject
) -> None:
    training = data.draw(trainings(strategy=strategy, schedule=accumulating))
    assert_trains(rank_pool, reference, subject, training)


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.leaves_unreduced")
@pytest.mark.parametrize("does", no_sync_cases.DOES, ids=lambda does: does.__name__)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_inside_are_each_ranks_own(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    use_orig_params: bool,
    does: Any,
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    asks, libraries = no_sync_cases.around_no_sync, (reference, subject)
    seen = assert_probes_agree(rank_pool, libraries, asks, setup, does=does)
    assert all(outcome.raised is None for outcome in seen), seen[0].raised


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.restores")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_reduced_again_behind_it(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, nested: bool
) -> None:
    setup = Setup(strategy, wrap="leaves")
    assert_probes_agree(
        rank_pool, (reference, subject), hook_cases.no_sync_and_restored, setup, nested=nested
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.refused")
@pytest.mark.parametrize(
    "asks",
    [hook_cases.no_sync_of_an_inner_unit, hook_cases.no_sync_in_forward],
    ids=lambda asks: asks.__name__,
)
def test_is_refused_on_inner_units_and_in_forward(
    subject: Library, reference: Library, rank_pool: RankPool, asks: Any
) -> None:
    seen = assert_probes_agree(rank_pool, (reference, subject), asks, Setup(wrap="leaves"))
    assert "Error" in str(seen[0].value)
