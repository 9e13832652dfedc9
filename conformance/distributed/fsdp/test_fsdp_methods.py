"""What a wrapped module is to its user: names, units, roots, apply, and conversions."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.distributed.fsdp import construct_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import assert_probes_agree, assert_ranks_agree, outcomes
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankPool

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@clause("distributed.fsdp.fully_sharded_data_parallel.attributes")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("wrap", ["root", "leaves", "manual"])
def test_names_attributes_and_units(
    subject: Library, reference: Library, rank_pool: RankPool, wrap: str, use_orig_params: bool
) -> None:
    setup = Setup(wrap=wrap, arguments={"use_orig_params": use_orig_params})
    seen = assert_probes_agree(rank_pool, (reference, subject), construct_cases.attributes, setup)
    assert seen[0].raised is None, seen[0].raised


@clause("distributed.fsdp.fully_sharded_data_parallel.roots")
@pytest.mark.parametrize("wrap", ["root", "leaves", "manual"])
def test_one_unit_is_the_root(subject: Library, reference: Library, rank_pool: RankPool, wrap: str) -> None:
    assert_probes_agree(rank_pool, (reference, subject), construct_cases.roots, Setup(wrap=wrap))


@clause("distributed.fsdp.fully_sharded_data_parallel.attributes")
def test_a_wrapped_sequential_takes_indices(
    subject: Library, reference: Library, rank_pool: RankPool
) -> None:
    expected, actual = (
        outcomes(rank_pool, library, "construct_cases:indexed") for library in (reference, subject)
    )
    assert_ranks_agree(expected, actual)
    assert actual[0].value[:2] == ["Linear", "Tanh"]


@clause("distributed.fsdp.fully_sharded_data_parallel.apply")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_apply_shows_whole_parameters(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    seen = assert_probes_agree(rank_pool, (reference, subject), construct_cases.applied, setup)
    assert seen[0].raised is None, seen[0].raised


@clause("distributed.fsdp.fully_sharded_data_parallel.conversions")
@pytest.mark.parametrize("how", ["double", "to", "cpu"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_dtype_may_change_behind_wrapping(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    use_orig_params: bool,
    how: str,
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    asks: Any = construct_cases.converted
    assert_probes_agree(rank_pool, (reference, subject), asks, setup, how=how)


@clause("distributed.fsdp.fully_sharded_data_parallel.conversions")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moving_a_model_to_where_it_is_loses_no_graph(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    assert_probes_agree(rank_pool, (reference, subject), construct_cases.moved_between, setup)
