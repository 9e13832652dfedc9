"""Optimizers that step while the backward runs: by hooks of the user's, or by torch's own helper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.distributed.fsdp.judging import assert_all_close, assert_ranks_agree, outcomes
from conformance.distributed.fsdp.optimizer_in_backward_cases import trained_unsharded
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import Seen, raised
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.tolerances import TRAINED
from conformance.ranks import RankPool

Ranks = Callable[..., RankPool]


def seen_by(library: Library, pool: RankPool, *, accumulates: bool, **asked: Any) -> Seen:
    return outcomes(pool, library, "optimizer_in_backward_cases:trained", accumulates=accumulates, **asked)


def assert_trained(seen: Seen, accumulates: bool) -> None:
    expected = trained_unsharded(len(seen), accumulates)
    for outcome in seen:
        assert outcome.raised is None, outcome.raised
        assert outcome.value["left"] == 0
        assert_all_close("whole_parameters", expected, outcome.value["whole"], TRAINED)


def has_trained(seen: Seen, accumulates: bool) -> bool:
    try:
        assert_trained(seen, accumulates)
    except AssertionError:
        return False
    return True


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_optimizers_step_in_backward(
    subject: Library, ranks: Ranks, world_size: int, strategy: str, accumulates: bool
) -> None:
    asked = {"by": "torch", "strategy": strategy, "use_orig_params": True}
    assert_trained(seen_by(subject, ranks(world_size), accumulates=accumulates, **asked), accumulates)


def refusal(library: Library, pool: RankPool, strategy: str, is_late: bool) -> Seen:
    case = "optimizer_in_backward_cases:without_original_parameters"
    return outcomes(pool, library, case, strategy=strategy, is_late=is_late)


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_optimizers_are_refused_without_original_parameters(
    subject: Library, reference: Library, ranks: Ranks, world_size: int, strategy: str
) -> None:
    expected, actual = (
        refusal(library, ranks(world_size), strategy, is_late=False) for library in (reference, subject)
    )
    assert_ranks_agree(expected, actual)
    assert raised(actual, RuntimeError, "only supported with use_orig_params=True")


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.stepping_hooks")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_optimizers_are_refused_without_original_parameters_at_any_time(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, strategy: str
) -> None:
    deviation.judge(
        lambda library: refusal(library, ranks(world_size), strategy, is_late=True),
        we_do=lambda seen: raised(seen, RuntimeError, "only supported with use_orig_params=True"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.stepping_hooks")
@pytest.mark.deviation("fsdp.stepping_hooks")
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    ("by", "strategy", "use_orig_params"),
    [("hooks", "FULL_SHARD", False), ("hooks", "NO_SHARD", False), ("hooks", "FULL_SHARD", True)],
)
def test_whatever_steps_in_backward_sees_the_average(
    deviation: DeviationJudge,
    ranks: Ranks,
    world_size: int,
    by: str,
    strategy: str,
    use_orig_params: bool,
    accumulates: bool,
) -> None:
    asked = {"by": by, "strategy": strategy, "use_orig_params": use_orig_params}
    deviation.judge(
        lambda library: seen_by(library, ranks(world_size), accumulates=accumulates, **asked),
        we_do=lambda seen: has_trained(seen, accumulates),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.optimizers")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_where_nothing_accumulates_no_hook_is_called(
    subject: Library, ranks: Ranks, world_size: int, use_orig_params: bool
) -> None:
    """A step taken there would be the last one once more."""
    case = "optimizer_in_backward_cases:only_an_input"
    for outcome in outcomes(ranks(world_size), subject, case, use_orig_params=use_orig_params):
        assert outcome.raised is None, outcome.raised
        by_backward, in_the_end = outcome.value
        assert by_backward == in_the_end
