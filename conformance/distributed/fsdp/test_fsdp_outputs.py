"""Units of which some outputs, or all, get no gradient in backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.distributed.fsdp.judging import assert_ranks_agree, outcomes
from conformance.distributed.fsdp.output_cases import DOUBLED, KINDS
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import Seen, raised
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.ranks import RankPool

Ranks = Callable[..., RankPool]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
FULL = pytest.mark.profile("full")
DEADLINE_S, OF_A_CASE_S = 300, 130  # Dynamo takes seconds, on each rank


@clause("distributed.fsdp.fully_sharded_data_parallel.some_outputs")
@pytest.mark.parametrize("uses", ["one", "both, one without gradient"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_trains_by_some_of_its_outputs(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    use_orig_params: bool,
    uses: str,
) -> None:
    assert_trains_alike(rank_pool, reference, subject, strategy, use_orig_params, uses)


@clause("distributed.fsdp.fully_sharded_data_parallel.some_outputs")
@pytest.mark.deadline(DEADLINE_S)
@pytest.mark.parametrize("use_orig_params", [pytest.param(False, marks=FULL), True])
def test_a_compiled_block_trains_by_some_of_its_outputs(
    subject: Library, reference: Library, rank_pool: RankPool, use_orig_params: bool
) -> None:
    """What was several nodes of the graph is one, with all outputs of the block."""
    assert_trains_alike(rank_pool, reference, subject, "FULL_SHARD", use_orig_params, "compiled")


@clause("distributed.fsdp.fully_sharded_data_parallel.outputs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["inner", "outermost"])
@pytest.mark.parametrize(
    "strategy", ["FULL_SHARD", *(pytest.param(one, marks=FULL) for one in ("SHARD_GRAD_OP", "NO_SHARD"))]
)
@pytest.mark.world_sizes(fewest=2)
def test_a_unit_returns_whatever_a_module_may(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, by: str, kind: str
) -> None:
    assert_trains_alike(rank_pool, reference, subject, strategy, False, kind, by=by)


@clause("distributed.fsdp.fsdp_torch_limit_removed.outputs_written_to")
@pytest.mark.deviation("fsdp.outputs_written_to")
@pytest.mark.parametrize("by", ["inner", "outermost"])
def test_what_a_unit_returns_may_be_written_to(deviation: DeviationJudge, ranks: Ranks, by: str) -> None:
    def seen_in(library: Library) -> tuple[Seen, Seen]:
        given = {"strategy": "FULL_SHARD", "use_orig_params": False, "by": by}
        in_place, not_so = (
            outcomes(ranks(2), library, "output_cases:trained", uses=uses, **given) for uses in DOUBLED
        )
        return in_place, not_so

    deviation.judge(
        seen_in,
        torch_does=lambda seen: raised(seen[0], ValueError, "expected to be in states"),
        we_do=are_alike,
    )


def are_alike(seen: tuple[Seen, Seen]) -> bool:
    try:
        assert_ranks_agree(*seen)
    except AssertionError:
        return False
    return True


def assert_trains_alike(
    pool: RankPool,
    reference: Library,
    subject: Library,
    strategy: str,
    use_orig_params: bool,
    uses: str,
    **more: str,
) -> None:
    expected, actual = (
        outcomes(
            pool,
            library,
            "output_cases:trained",
            strategy=strategy,
            use_orig_params=use_orig_params,
            uses=uses,
            deadline_s=OF_A_CASE_S,
            **more,
        )
        for library in (reference, subject)
    )
    assert_ranks_agree(expected, actual)
    assert all(outcome.raised is None for outcome in actual), actual[0].raised


@clause("distributed.fsdp.fsdp_torch_limit_removed.no_outputs")
@pytest.mark.deviation("fsdp.no_outputs")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_unit_that_no_gradient_reaches_gets_none(
    deviation: DeviationJudge, rank_pool: RankPool, use_orig_params: bool
) -> None:
    def seen_in(library: Library) -> tuple[Seen, Seen]:
        given = {"strategy": "FULL_SHARD", "use_orig_params": use_orig_params}
        silent, detached = (
            outcomes(rank_pool, library, "output_cases:trained", uses=uses, **given)
            for uses in ("none", "detached")
        )
        return silent, detached

    deviation.judge(
        seen_in,
        torch_does=lambda seen: raised(seen[0], AssertionError, "_saved_grad_shard"),
        we_do=are_alike,
        may_agree=True,
    )
