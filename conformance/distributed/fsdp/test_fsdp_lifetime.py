"""Modules that are called without anything, and what is left of a model that is gone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.distributed.fsdp.judging import assert_ranks_agree, outcomes
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import Seen
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.ranks import RankPool

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@clause("distributed.fsdp.fully_sharded_data_parallel.without_inputs")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_module_that_takes_nothing(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str
) -> None:
    expected, actual = (
        outcomes(rank_pool, library, "lifetime_cases:called_without_inputs", strategy=strategy)
        for library in (reference, subject)
    )
    assert_ranks_agree(expected, actual)
    assert actual[0].raised is None, actual[0].raised


def left_behind(library: Library, pool: RankPool, **arguments: bool) -> Seen:
    return outcomes(pool, library, "lifetime_cases:left_behind", **arguments)


def nothing_is_left(seen: Seen) -> bool:
    return all(outcome.raised is None and outcome.value == [] for outcome in seen)


@clause("distributed.fsdp.fsdp_torch_limit_removed.freed")
@pytest.mark.world_sizes(fewest=2)
def test_original_parameters_go_with_their_model(
    subject: Library, ranks: Callable[..., RankPool], world_size: int
) -> None:
    seen = left_behind(subject, ranks(world_size), use_orig_params=True)
    assert nothing_is_left(seen), seen


@clause("distributed.fsdp.fsdp_torch_limit_removed.freed")
@pytest.mark.deviation("fsdp.models_are_freed")
def test_flat_parameters_go_with_their_model(
    deviation: DeviationJudge, ranks: Callable[..., RankPool], world_size: int
) -> None:
    deviation.judge(
        lambda library: left_behind(library, ranks(world_size), use_orig_params=False),
        torch_does=lambda seen: all(outcome.raised is None and outcome.value for outcome in seen),
        we_do=nothing_is_left,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.freed")
@pytest.mark.deviation("fsdp.inputs_hold_models")
@pytest.mark.world_sizes(fewest=2)
def test_an_input_that_a_unit_returned_holds_no_model(
    deviation: DeviationJudge, ranks: Callable[..., RankPool], world_size: int
) -> None:
    deviation.judge(
        lambda library: left_behind(library, ranks(world_size), use_orig_params=True, returns_input=True),
        torch_does=lambda seen: all(outcome.raised is None and outcome.value for outcome in seen),
        we_do=nothing_is_left,
    )
