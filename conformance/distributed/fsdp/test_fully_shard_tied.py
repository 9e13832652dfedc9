"""Parameters that modules of different units of fully_shard have in common."""

from __future__ import annotations

import pytest

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
