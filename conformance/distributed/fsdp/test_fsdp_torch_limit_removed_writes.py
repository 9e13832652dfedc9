"""Whatever is done to parameters and gradients between two calls of a model counts as it does without sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.distributed.fsdp import written_cases
from conformance.distributed.fsdp.judging import assert_ranks_agree, outcomes
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import Seen, raised
from conformance.distributed.fsdp.written_cases import Forked, written_without_sharding
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.tolerances import ONE_STEP
from conformance.ranks import RankPool

each_strategy = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
both_kinds = pytest.mark.parametrize("use_orig_params", [False, True])
Probe = Callable[[Library], Seen]


def probe_of(pool: RankPool, does: Any, strategy: str, use_orig_params: bool, **makes: Any) -> Probe:
    return lambda library: outcomes(
        pool,
        library,
        "written_cases:written",
        does=does,
        strategy=strategy,
        use_orig_params=use_orig_params,
        **makes,
    )


def is_as_without_sharding(seen: Seen, does: Any, **makes: Any) -> bool:
    expected = written_without_sharding(does, len(seen), **makes)
    for outcome in seen:
        if outcome.raised is not None or outcome.value["whole"].keys() != expected["whole"].keys():
            return False
        actual = outcome.value
        pairs = [*zip(expected["outputs"], actual["outputs"], strict=True)]
        pairs += [(value, actual["whole"][name]) for name, value in expected["whole"].items()]
        if any(ONE_STEP.excess(value, one.values) is not None for value, one in pairs):
            return False
    return True


def judge_as_without_sharding(deviation: DeviationJudge, probe: Probe, does: Any) -> None:
    deviation.judge(
        probe,
        we_do=lambda seen: is_as_without_sharding(seen, does),
        may_agree=True,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.writes_are_seen")
@pytest.mark.deviation("fsdp.written_behind_counters")
@both_kinds
@each_strategy
@pytest.mark.parametrize(
    "does",
    [
        written_cases.exchanged_in_place,
        written_cases.exchanged_by_memory,
        written_cases.from_a_vector,
        written_cases.memory_while_whole,
        written_cases.stepped_and_cleared,
        written_cases.inferred_first,
    ],
    ids=lambda does: does.__name__,
)
def test_what_was_written_is_computed_with(
    deviation: DeviationJudge, rank_pool: RankPool, does: Any, strategy: str, use_orig_params: bool
) -> None:
    judge_as_without_sharding(deviation, probe_of(rank_pool, does, strategy, use_orig_params), does)


@clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
@pytest.mark.deviation("fsdp.graphs_of_former_weights")
@both_kinds
@each_strategy
@pytest.mark.parametrize("makes", [written_cases.Headed, Forked], ids=["root", "inner"])
@pytest.mark.parametrize(
    "does",
    [
        written_cases.stepped_between,
        written_cases.stepped_between_by_a_fused_one,
        written_cases.changed_between,
        written_cases.memory_between,
    ],
    ids=lambda does: does.__name__,
)
def test_a_backward_of_weights_that_were_kept_and_written_to(
    deviation: DeviationJudge,
    rank_pool: RankPool,
    does: Any,
    makes: Any,
    strategy: str,
    use_orig_params: bool,
) -> None:
    """The outermost unit is kept from forward to backward, and others where nothing is resharded."""

    def is_refused(seen: Seen) -> bool:
        return raised(seen, RuntimeError, "has been modified by an inplace operation")

    deviation.judge(
        probe_of(rank_pool, does, strategy, use_orig_params, makes=makes),
        we_do=is_refused,
        may_agree=True,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
@pytest.mark.deviation("fsdp.graphs_of_former_weights")
@both_kinds
@each_strategy
def test_a_backward_that_does_not_read_what_was_written(
    deviation: DeviationJudge, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    does, makes = written_cases.stepped_beside, written_cases.Headed
    deviation.judge(
        probe_of(rank_pool, does, strategy, use_orig_params, makes=makes),
        we_do=lambda seen: is_as_without_sharding(seen, does, makes=makes),
        may_agree=True,
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.writes.shapes")
@each_strategy
@pytest.mark.parametrize(
    "does",
    [written_cases.given_more_elements, written_cases.given_one_dimension],
    ids=lambda does: does.__name__,
)
def test_memory_of_another_shape(
    subject: Library, reference: Library, rank_pool: RankPool, does: Any, strategy: str
) -> None:
    probe = probe_of(rank_pool, does, strategy, use_orig_params=True)
    actual = probe(subject)
    assert_ranks_agree(probe(reference), actual)
    assert raised(actual, RuntimeError, "Cannot writeback") is (does is written_cases.given_more_elements)


@clause("distributed.fsdp.fsdp_torch_limit_removed.waiting_gradients")
@pytest.mark.deviation("fsdp.waiting_gradients")
@both_kinds
@each_strategy
@pytest.mark.parametrize(
    "does",
    [
        written_cases.zeroed,
        written_cases.replaced_gradients,
        written_cases.not_reached,
        written_cases.moved,
    ],
    ids=lambda does: does.__name__,
)
def test_gradients_that_wait_are_what_is_shown_of_them(
    deviation: DeviationJudge, rank_pool: RankPool, does: Any, strategy: str, use_orig_params: bool
) -> None:
    judge_as_without_sharding(deviation, probe_of(rank_pool, does, strategy, use_orig_params), does)


@clause("distributed.fsdp.fsdp_torch_limit_removed.others_in_their_places")
@pytest.mark.deviation("fsdp.others_in_their_places")
@both_kinds
@each_strategy
def test_a_call_with_other_parameters_is_refused(
    deviation: DeviationJudge, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    does = written_cases.called_with_others
    deviation.judge(
        probe_of(rank_pool, does, strategy, use_orig_params),
        we_do=lambda seen: raised(seen, RuntimeError, "was replaced by another tensor"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.others_in_their_places")
@pytest.mark.deviation("fsdp.others_in_their_places")
@each_strategy
def test_a_parameter_that_a_unit_would_not_see_is_refused(
    deviation: DeviationJudge, rank_pool: RankPool, strategy: str
) -> None:
    does = written_cases.given_a_parameter
    deviation.judge(
        probe_of(rank_pool, does, strategy, use_orig_params=False),
        we_do=lambda seen: raised(seen, RuntimeError, "body.bias was replaced by another tensor"),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.cast_between")
@pytest.mark.deviation("fsdp.cast_between")
@both_kinds
@each_strategy
@pytest.mark.parametrize(
    "does", [written_cases.cast_between, written_cases.flat_cast_between], ids=lambda does: does.__name__
)
def test_a_cast_between_forward_and_backward_is_refused(
    deviation: DeviationJudge, rank_pool: RankPool, does: Any, strategy: str, use_orig_params: bool
) -> None:
    deviation.judge(
        probe_of(rank_pool, does, strategy, use_orig_params),
        we_do=lambda seen: raised(
            seen, RuntimeError, "was moved or cast between its forward and its backward"
        ),
    )
