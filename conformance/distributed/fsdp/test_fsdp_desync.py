"""Ranks that issue collectives in a different order than the others."""

from __future__ import annotations

import pytest

from conformance.distributed.fsdp.scenes.desync_programs import (
    LARGE,
    WAYS,
    Program,
    is_silently_wrong,
    judge_at_once,
    reports_both,
    seen_of,
    steps_late,
)
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge

pytestmark = pytest.mark.deadline(90)  # new pools of ranks take seconds


@clause("distributed.fsdp.fsdp_desync.parts_with_equal_sizes")
@pytest.mark.deviation("fsdp.order_of_units")
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("api", "parts_at", "hidden"),
    [
        ("FSDP1", 0, 8),
        ("FSDP1", 2, 8),
        pytest.param("FSDP1", 2, LARGE, marks=FULL_PROFILE),
        ("fully_shard", 2, 8),
        pytest.param("fully_shard", 0, 8, marks=FULL_PROFILE),
    ],
)
def test_units_of_equal_sizes_in_another_order_raise(
    deviation: DeviationJudge, mode: str, api: str, parts_at: int, hidden: int
) -> None:
    program = Program(hidden=(hidden,) * 3, mode=mode, parts_at=parts_at, api=api)
    deviation.judge(
        lambda library: seen_of(library, program),
        torch_does=is_silently_wrong,
        we_do=lambda outcome: reports_both(outcome) and max(steps_late(outcome, program)) <= 1,
    )


@clause("distributed.fsdp.fsdp_desync.parts_with_unequal_sizes")
@pytest.mark.deviation("fsdp.order_of_units")
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("api", "hidden"),
    [
        ("FSDP1", (8, 16, 24)),
        ("FSDP1", (8, 24, 16)),
        pytest.param("FSDP1", (8, LARGE, 2 * LARGE), marks=FULL_PROFILE),
        pytest.param("fully_shard", (8, 16, 24), marks=FULL_PROFILE),
    ],
)
@pytest.mark.parametrize("parts_at", [pytest.param(0, marks=FULL_PROFILE), 2])
def test_units_of_unequal_sizes_in_another_order_raise(
    deviation: DeviationJudge, mode: str, api: str, hidden: tuple[int, ...], parts_at: int
) -> None:
    judge_at_once(deviation, Program(hidden=hidden, mode=mode, parts_at=parts_at, api=api))


LEFT = "left 'blocks.1' for the end of backward without blocks.1.{}.bias"


@clause("distributed.fsdp.fsdp_desync.parts_by_gradients")
@pytest.mark.deviation("fully_shard.gradients_of_some_ranks")
@pytest.mark.parametrize("parts_at", [2, pytest.param(0, marks=FULL_PROFILE)])
@pytest.mark.parametrize(
    ("by", "astray", "other"),
    [
        pytest.param("unused", LEFT.format(0), "reduced 'blocks.1'", marks=FULL_PROFILE),
        ("others unused", LEFT.format(0), LEFT.format(2)),
        ("frozen", "reduced 'blocks.1' without blocks.1.0.bias", "reduced 'blocks.1'"),
    ],
    ids=["unused", "others unused", "frozen"],
)
def test_gradients_on_one_rank_only_raise(
    deviation: DeviationJudge, parts_at: int, by: str, astray: str, other: str
) -> None:
    # With a width of 4, the two biases of a block have the same size.
    program = Program(hidden=(4,) * 3, parts_at=parts_at, api="fully_shard", by=by)
    texts = (astray, other, "the ranks have gradients of different parameters")
    judge_at_once(deviation, program, *texts, are_alike=by == "others unused")


@clause("distributed.fsdp.fsdp_desync.parts_where_orders_change")
@pytest.mark.deviation("fsdp.order_of_units")
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_earlier_order_on_one_rank_is_reported(deviation: DeviationJudge, mode: str) -> None:
    program = Program((*WAYS, *WAYS, WAYS[0], WAYS[0], WAYS[0], WAYS[0]), mode=mode, parts_at=4)
    deviation.judge(
        lambda library: seen_of(library, program),
        torch_does=is_silently_wrong,
        we_do=lambda outcome: (
            reports_both(outcome) and steps_late(outcome, program) in ([0, 0], [0, 1], [1, 1], [1, 2])
        ),
    )
