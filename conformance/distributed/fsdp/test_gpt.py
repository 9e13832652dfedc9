"""The gate's GPT on two ranks with half of each batch has the loss curve of one process with the full batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from conformance.distributed.fsdp import gpt_cases
from conformance.distributed.fsdp.gpt_cases import PARTS, train_unsharded
from conformance.distributed.fsdp.twins import FULL, TwinsOf
from conformance.judge.clauses import clause

STEPS, DEADLINE_S = 24, 120
# Two terms have the same sum in either order. Only the loss's mean over the ranks is rounded differently.
SAME_CURVE = 1e-5


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"),
    [
        ("FULL_SHARD", False),
        pytest.param("FULL_SHARD", True, marks=FULL),
        pytest.param("SHARD_GRAD_OP", True, marks=FULL),
        pytest.param("NO_SHARD", False, marks=FULL),
    ],
)
def test_gpt_learns_as_in_one_process(twins_of: TwinsOf, strategy: str, use_orig_params: bool) -> None:
    expected = train_unsharded(STEPS)
    assert expected[-1] < expected[0] - 1, "the model learns, or its curve would tell nothing"
    arguments = {"strategy": strategy, "use_orig_params": use_orig_params, "deadline_s": DEADLINE_S}
    for curve in twins_of(PARTS).values(gpt_cases.train_sharded, steps=STEPS, **arguments):
        assert_same_curve(expected, curve)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.resumes")
@pytest.mark.parametrize(
    ("worlds", "use_orig_params"),
    [((2, 4), True), pytest.param((4, 1), False, marks=FULL), pytest.param((1, 2), True, marks=FULL)],
)
def test_gpt_goes_on_with_another_number_of_ranks(
    twins_of: TwinsOf, tmp_path: Path, worlds: tuple[int, int], use_orig_params: bool
) -> None:
    before, after = map(twins_of, worlds)
    arguments: dict[str, Any] = {"folder": str(tmp_path), "use_orig_params": use_orig_params}
    arguments["deadline_s"] = DEADLINE_S
    expected = train_unsharded(STEPS)
    first, *_ = before.values(gpt_cases.begin, steps=STEPS // 2, **arguments)
    for then in after.values(gpt_cases.go_on, steps=(STEPS // 2, STEPS), **arguments):
        assert_same_curve(expected, [*first, *then])


def assert_same_curve(expected: list[float], actual: list[float]) -> None:
    assert len(expected) == len(actual)
    apart = [
        step for step in range(STEPS) if not math.isclose(actual[step], expected[step], rel_tol=SAME_CURVE)
    ]
    assert not apart, f"steps {apart}: got {actual}, expected {expected}"
