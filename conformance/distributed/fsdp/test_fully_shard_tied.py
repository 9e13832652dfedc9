"""Parameters that modules of different units of fully_shard have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import fully_shard_tied_cases as cases
from conformance.distributed.fsdp.judging import outcomes
from conformance.distributed.fsdp.test_fully_shard_construct import judge_by_hand
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import RankPool


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize(
    "units",
    [
        ("embed", "body.2"),
        ("body.2", "embed"),
        ("embed",),
        pytest.param(("body",), marks=pytest.mark.profile("full")),
        pytest.param(("embed", "body"), marks=pytest.mark.profile("full")),
        ("body.2", "body"),
    ],
    ids=" ".join,
)
def test_tied_weights_stay_tied(
    deviation: DeviationJudge, rank_pool: RankPool, units: tuple[str, ...]
) -> None:
    """The unit that is sharded first is the owner."""
    expected = observe(cases.tied_by_hand, rank_pool.world_size)
    judge_by_hand(deviation, rank_pool, expected, cases.tied, units=units)


@clause("distributed.fsdp.fully_shard.tied_in_two_models")
@pytest.mark.deviation("fully_shard.tied_in_two_models")
def test_models_do_not_part_in_silence(deviation: DeviationJudge, rank_pool: RankPool) -> None:
    def probe(library: Library) -> list[Outcome]:
        return outcomes(
            rank_pool, library, "fully_shard_construct_cases:probe", asks=cases.tied_in_two_models
        )

    deviation.judge(probe, we_do=lambda seen: all(str(one.value).startswith("ValueError") for one in seen))


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize(
    ("trained", "zeros"), [(True, False), (False, False), (True, True)], ids=["trained", "frozen", "zeros"]
)
def test_owners_wait_for_what_is_around_them(
    deviation: DeviationJudge, rank_pool: RankPool, trained: bool, zeros: bool
) -> None:
    """In the backward, and where their own forward fails and is caught."""
    expected = observe(cases.around_by_hand, trained)
    judge_by_hand(deviation, rank_pool, expected, cases.around, trained=trained, zeros=zeros)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
def test_owners_are_unsharded_where_others_need_them(deviation: DeviationJudge, rank_pool: RankPool) -> None:
    """In a backward for which the owner itself is not: a lookup reads no weights there, the last layer does."""
    expected = observe(cases.tied_by_hand, rank_pool.world_size)
    how: dict[str, Any] = {"units": ("embed", "body.2"), "not_unsharded": "embed"}
    judge_by_hand(deviation, rank_pool, expected, cases.tied, **how)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
def test_owners_are_unsharded_where_others_need_nothing(
    deviation: DeviationJudge, rank_pool: RankPool
) -> None:
    """Though another one that comes first in the backward is not unsharded for it."""
    judge_by_hand(deviation, rank_pool, observe(cases.shifted, None), cases.shifted)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize("has_run", [False, True], ids=["before the first forward", "behind a step"])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "by its handle"])
def test_modules_unshard_what_others_own(
    deviation: DeviationJudge, rank_pool: RankPool, has_run: bool, waits: bool
) -> None:
    expected = observe(cases.unsharded_by_hand, has_run)
    judge_by_hand(deviation, rank_pool, expected, cases.unsharded, has_run=has_run, waits=waits)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.world_sizes(fewest=2)
def test_prefetching_gathers_what_others_own(deviation: DeviationJudge, rank_pool: RankPool) -> None:
    forward = ["FSDPSequential", "gather", "FSDPEmbedding", "gather", "FSDPLinear", "FSDPLinear"]
    expected = observe(lambda: [*forward, "gather", "backward"])
    judge_by_hand(deviation, rank_pool, expected, cases.prefetched)


@clause("distributed.fsdp.fully_shard.tied_across_groups")
@pytest.mark.deviation("fully_shard.tied_across_groups")
@pytest.mark.parametrize("differs", ["param_dtype", "reduce_dtype"])
def test_one_parameter_has_one_precision(
    deviation: DeviationJudge, rank_pool: RankPool, differs: str
) -> None:
    def probe(library: Library) -> list[Outcome]:
        asks: dict[str, Any] = {"asks": cases.of_other_dtypes, differs: torch.float32}
        return outcomes(rank_pool, library, "fully_shard_construct_cases:probe", **asks)

    named = "ValueError: weight was sharded by an earlier call, as weight: to compute in torch.float64"
    deviation.judge(probe, we_do=lambda seen: all(str(one.value).startswith(named) for one in seen))
