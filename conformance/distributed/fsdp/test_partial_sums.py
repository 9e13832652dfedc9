"""Gradients of replicas that put off their all-reduce, for any parameters that micro-batches use."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.distributed.fsdp import partial_sum_cases as cases
from conformance.distributed.fsdp.partial_sum_cases import LayerChoices
from conformance.distributed.fsdp.rank_judging import share_of_examples
from conformance.distributed.fsdp.twins import FULL, TwinsOf
from conformance.judge.clauses import clause
from conformance.judge.outcome import observe

_LAYERS = st.sets(st.integers(0, cases.LAYERS - 1), min_size=1).map(sorted)


@clause("distributed.fsdp.fully_shard.partial_sums")
@pytest.mark.deviation("fully_shard.partial_sums")
@pytest.mark.parametrize(("all_ranks", "shards"), [(2, 1), pytest.param(4, 2, marks=FULL)])
@share_of_examples(0.2)
@given(choices=st.lists(_LAYERS, min_size=2, max_size=3), is_unit_each=st.booleans())
@example(choices=[[0], [1]], is_unit_each=False)
@example(choices=[[0, 1], [2]], is_unit_each=False)
@example(choices=[[0, 1], [1]], is_unit_each=True)
def test_partial_sums_belong_to_their_parameters(
    sites_of: TwinsOf, all_ranks: int, shards: int, choices: LayerChoices, is_unit_each: bool
) -> None:
    sites_of(all_ranks).deviate_by_hand(
        observe(cases.partial_sums_by_hand, choices, all_ranks),
        cases.partial_sums,
        choices=choices,
        shards=shards,
        is_unit_each=is_unit_each,
        may_agree=True,
    )
