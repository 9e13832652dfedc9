"""Ranks that issue collectives in a different order than the others."""

from __future__ import annotations

import pytest

from conformance.distributed.fsdp.scenes.desync_programs import (
    LARGE,
    ORDERS,
    Program,
    is_silently_wrong,
    judge_raises_at_once,
    reports_both,
    reports_of,
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
    ("api", "differs_at", "hidden"),
    [
        ("FSDP1", 0, 8),
        ("FSDP1", 2, 8),
        pytest.param("FSDP1", 2, LARGE, marks=FULL_PROFILE),
        ("fully_shard", 2, 8),
        pytest.param("fully_shard", 0, 8, marks=FULL_PROFILE),
    ],
)
def test_units_of_equal_sizes_in_another_order_raise(
    deviation: DeviationJudge, mode: str, api: str, differs_at: int, hidden: int
) -> None:
    program = Program(hidden=(hidden,) * 3, mode=mode, differs_at=differs_at, api=api)
    deviation.judge(
        lambda library: reports_of(library, program),
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
@pytest.mark.parametrize("differs_at", [pytest.param(0, marks=FULL_PROFILE), 2])
def test_units_of_unequal_sizes_in_another_order_raise(
    deviation: DeviationJudge, mode: str, api: str, hidden: tuple[int, ...], differs_at: int
) -> None:
    judge_raises_at_once(deviation, Program(hidden=hidden, mode=mode, differs_at=differs_at, api=api))


LEFT = "left 'blocks.1' for the end of backward without blocks.1.{}.bias"


@clause("distributed.fsdp.fsdp_desync.parts_by_gradients")
@pytest.mark.deviation("fully_shard.gradients_of_some_ranks")
@pytest.mark.parametrize("differs_at", [2, pytest.param(0, marks=FULL_PROFILE)])
@pytest.mark.parametrize(
    ("differs_by", "astray", "other"),
    [
        pytest.param("unused bias", LEFT.format(0), "reduced 'blocks.1'", marks=FULL_PROFILE),
        ("other unused bias", LEFT.format(0), LEFT.format(2)),
        ("frozen bias", "reduced 'blocks.1' without blocks.1.0.bias", "reduced 'blocks.1'"),
    ],
    ids=["unused bias", "other unused bias", "frozen bias"],
)
def test_gradients_on_one_rank_only_raise(
    deviation: DeviationJudge, differs_at: int, differs_by: str, astray: str, other: str
) -> None:
    # With a width of 4, the two biases of a block have the same size.
    program = Program(hidden=(4,) * 3, differs_at=differs_at, api="fully_shard", differs_by=differs_by)
    texts = (astray, other, "the ranks have gradients of different parameters")
    judge_raises_at_once(deviation, program, *texts, are_alike=differs_by == "other unused bias")


@clause("distributed.fsdp.fsdp_desync.parts_where_orders_change")
@pytest.mark.deviation("fsdp.order_of_units")
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_earlier_order_on_one_rank_is_reported(deviation: DeviationJudge, mode: str) -> None:
    program = Program((*ORDERS, *ORDERS, ORDERS[0], ORDERS[0], ORDERS[0], ORDERS[0]), mode=mode, differs_at=4)
    deviation.judge(
        lambda library: reports_of(library, program),
        torch_does=is_silently_wrong,
        we_do=lambda outcome: (
            reports_both(outcome) and steps_late(outcome, program) in ([0, 0], [0, 1], [1, 1], [1, 2])
        ),
    )
