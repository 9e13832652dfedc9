"""The gate's real model, on two ranks that have half of each batch: the curve of one process that has it all."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.distributed.fsdp.gpt_cases import PARTS, train_whole
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankPool

STEPS = 24
_CASES = "conformance.distributed.fsdp.gpt_cases"
full = pytest.mark.profile("full")
# Two terms have one sum in either order; what is left are roundings of the loss's mean over the ranks.
SAME_CURVE = 1e-5


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"),
    [
        ("FULL_SHARD", False),
        pytest.param("FULL_SHARD", True, marks=full),
        pytest.param("SHARD_GRAD_OP", True, marks=full),
        pytest.param("NO_SHARD", False, marks=full),
    ],
)
def test_gpt_learns_as_in_one_process(
    subject: Library, ranks: Callable[..., RankPool], strategy: str, use_orig_params: bool
) -> None:
    subject.find("distributed.fsdp.FullyShardedDataParallel")
    expected = train_whole(STEPS)
    assert expected[-1] < expected[0] - 1, "the model learns, or its curve would tell nothing"
    seen = ranks(PARTS).run(
        f"{_CASES}:train_sharded",
        library=subject.spec,
        strategy=strategy,
        use_orig_params=use_orig_params,
        steps=STEPS,
        deadline_s=120,
    )
    for curve in seen:
        assert_same_curve(expected, curve)


@clause("distributed.fsdp.fsdp_distributed_checkpoint.resumes")
@pytest.mark.parametrize(
    ("worlds", "use_orig_params"),
    [((2, 4), True), pytest.param((4, 1), False, marks=full), pytest.param((1, 2), True, marks=full)],
)
def test_gpt_goes_on_with_another_number_of_ranks(
    subject: Library,
    ranks: Callable[..., RankPool],
    tmp_path: Path,
    worlds: tuple[int, int],
    use_orig_params: bool,
) -> None:
    before, after = worlds
    given: dict[str, Any] = {"library": subject.spec, "use_orig_params": use_orig_params, "deadline_s": 120}
    subject.find("distributed.fsdp.FullyShardedDataParallel")
    expected = train_whole(STEPS)
    first, *_ = ranks(before).run(f"{_CASES}:begin", steps=STEPS // 2, folder=str(tmp_path), **given)
    for then in ranks(after).run(f"{_CASES}:go_on", steps=(STEPS // 2, STEPS), folder=str(tmp_path), **given):
        assert_same_curve(expected, [*first, *then])


def assert_same_curve(expected: list[float], actual: list[float]) -> None:
    assert len(expected) == len(actual)
    apart = [
        step for step in range(STEPS) if not math.isclose(actual[step], expected[step], rel_tol=SAME_CURVE)
    ]
    assert not apart, f"steps {apart}: got {actual}, expected {expected}"
