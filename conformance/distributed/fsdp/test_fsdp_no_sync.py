"""Gradient accumulation inside and outside no_sync."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp import no_sync_cases
from conformance.distributed.fsdp.rank_judging import share_of_examples
from conformance.distributed.fsdp.twins import (
    FLAT,
    Twins,
    Wrapping,
    each,
    each_strategy,
    each_wrapping,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.strategies.sharding import steps, trainings

accumulating = steps(orders=("in turn", "no_sync", "no_sync"), befores=("",)).filter(
    lambda step: step.forwards > 1
)


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.accumulates")
@each_strategy
@share_of_examples(0.2)
@given(data=st.data())
def test_accumulates_with_and_without_it(twins: Twins, strategy: str, data: st.DataObject) -> None:
    twins.train(data.draw(trainings(strategy=strategy, schedule=accumulating)))


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.leaves_unreduced")
@pytest.mark.parametrize("does", no_sync_cases.DOES, ids=lambda does: does.__name__)
@each_wrapping
def test_gradients_inside_are_each_ranks_own(twins: Twins, wrapping: Wrapping, does: Any) -> None:
    twins.agree(no_sync_cases.around_no_sync, leaf_by_leaf(**wrapping), does=does)


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.cleared_gradients")
@pytest.mark.world_sizes(2)
@pytest.mark.deviation("fsdp.cleared_gradients_return")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_cleared_gradients_stay_cleared_after_unused_weight(twins: Twins, use_orig_params: bool) -> None:
    def has_earlier_ones(gradients: Any) -> bool:
        # The simulated device fills unwritten memory with nan, and torch adds some of it.
        returned, right = (gradient.values for gradient in gradients)
        return torch.equal(returned, 2 * right) or bool(returned.isnan().any())

    twins.deviate(
        no_sync_cases.cleared_after_unused_weight,
        use_orig_params=use_orig_params,
        torch_does=each(has_earlier_ones),
        we_do=each(lambda gradients: torch.equal(gradients[0].values, gradients[1].values)),
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.restores")
@pytest.mark.parametrize("nested", [False, True])
@each_strategy
def test_gradients_are_reduced_again_behind_it(twins: Twins, strategy: str, nested: bool) -> None:
    twins.agree(no_sync_cases.and_restored, leaf_by_leaf(strategy), nested=nested)


@clause("distributed.fsdp.fully_sharded_data_parallel.no_sync.refused")
@pytest.mark.parametrize(
    "asks", [no_sync_cases.of_an_inner_unit, no_sync_cases.in_forward], ids=lambda asks: asks.__name__
)
def test_no_sync_is_refused_on_inner_units_and_in_forward(twins: Twins, asks: Any) -> None:
    assert "Error" in str(twins.agree(asks, FLAT)[0].value)
