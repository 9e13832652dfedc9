"""Units some or all of whose outputs get no gradient in backward."""

from __future__ import annotations

import pytest

from conformance.distributed.fsdp.output_cases import DOUBLED, KINDS, trained
from conformance.distributed.fsdp.rank_judging import assert_ranks_agree
from conformance.distributed.fsdp.twins import (
    FULL,
    RankOutcomes,
    Twins,
    TwinsOf,
    Wrapping,
    both_kinds,
    each_wrapping,
    holds,
    raises,
)
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.tolerances import TRAINED

DEADLINE_S, OF_A_CASE_S = 300, 130  # Dynamo takes seconds on each rank


@clause("distributed.fsdp.fully_sharded_data_parallel.some_outputs")
@pytest.mark.parametrize("uses", ["one", "both, one without gradient"])
@each_wrapping
def test_unit_trains_by_some_outputs(twins: Twins, wrapping: Wrapping, uses: str) -> None:
    twins.agree(trained, tolerance=TRAINED, **wrapping, uses=uses)


@clause("distributed.fsdp.fully_sharded_data_parallel.some_outputs")
@pytest.mark.deadline(DEADLINE_S)
@pytest.mark.parametrize("use_orig_params", [pytest.param(False, marks=FULL), True])
def test_compiled_block_trains_by_some_outputs(twins: Twins, use_orig_params: bool) -> None:
    """A compiled block is a single node of the graph, with all of its outputs."""
    arguments = {"use_orig_params": use_orig_params, "uses": "compiled", "deadline_s": OF_A_CASE_S}
    twins.agree(trained, tolerance=TRAINED, **arguments)


@clause("distributed.fsdp.fully_sharded_data_parallel.outputs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["inner", "outermost"])
@pytest.mark.parametrize(
    "strategy",
    ["FULL_SHARD", *(pytest.param(strategy, marks=FULL) for strategy in ("SHARD_GRAD_OP", "NO_SHARD"))],
)
@pytest.mark.world_sizes(fewest=2)
def test_unit_returns_any_output_type(twins: Twins, strategy: str, by: str, kind: str) -> None:
    twins.agree(trained, tolerance=TRAINED, strategy=strategy, uses=kind, by=by)


@clause("distributed.fsdp.fsdp_torch_limit_removed.outputs_written_to")
@pytest.mark.deviation("fsdp.outputs_written_to")
@pytest.mark.parametrize("by", ["inner", "outermost"])
def test_unit_outputs_may_be_written_in_place(twins_of: TwinsOf, by: str) -> None:
    twins = twins_of(2)

    def in_place_and_not(library: Library) -> list[RankOutcomes]:
        return [twins.of(library, trained, uses=uses, by=by) for uses in DOUBLED]

    twins.judge(
        in_place_and_not,
        torch_does=lambda results: raises(ValueError, "expected to be in states")(results[0]),
        we_do=lambda results: holds(assert_ranks_agree, *results),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.no_outputs")
@pytest.mark.deviation("fsdp.no_outputs")
@both_kinds
def test_unit_without_output_gradients_gets_none(twins: Twins, use_orig_params: bool) -> None:
    def silent_and_detached(library: Library) -> list[RankOutcomes]:
        return [
            twins.of(library, trained, uses=uses, use_orig_params=use_orig_params)
            for uses in ("none", "detached")
        ]

    twins.judge(
        silent_and_detached,
        torch_does=lambda results: raises(AssertionError, "_saved_grad_shard")(results[0]),
        we_do=lambda results: holds(assert_ranks_agree, *results),
        may_agree=True,
    )
