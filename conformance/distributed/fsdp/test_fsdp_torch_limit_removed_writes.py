"""Writes to parameters and gradients between two calls of a model have the same effect as without sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from conformance.distributed.fsdp import written_cases
from conformance.distributed.fsdp.rank_judging import assert_all_close
from conformance.distributed.fsdp.twins import (
    RankOutcomes,
    Twins,
    Wrapping,
    each,
    each_strategy,
    each_wrapping,
    holds,
    raises,
)
from conformance.distributed.fsdp.written_cases import Does, Forked, Headed, written, written_without_sharding
from conformance.judge.clauses import clause
from conformance.judge.tolerances import ONE_STEP, TRAINED


def any_of(*does: Does) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("does", does, ids=lambda does: does.__name__)


def as_without_sharding(
    does: Does, ranks: int, makes: type[nn.Module] = Forked
) -> Callable[[RankOutcomes], bool]:
    expected = written_without_sharding(does, ranks, makes)

    def assert_same(actual: Any) -> None:
        for key, value in expected.items():
            assert_all_close(key, value, actual[key], ONE_STEP)

    return each(lambda value: holds(assert_same, value))


@clause("distributed.fsdp.fsdp_torch_limit_removed.writes_are_seen")
@pytest.mark.deviation("fsdp.written_behind_counters")
@each_wrapping
@any_of(
    written_cases.exchanged_in_place,
    written_cases.exchanged_after_forward,
    written_cases.exchanged_by_memory,
    written_cases.from_a_vector,
    written_cases.memory_while_unsharded,
    written_cases.stepped_and_cleared,
    written_cases.inferred_first,
)
def test_written_values_are_used_in_computation(twins: Twins, does: Does, wrapping: Wrapping) -> None:
    we_do = as_without_sharding(does, twins.world_size)
    twins.deviate(written, does=does, **wrapping, we_do=we_do, may_agree=True)


@clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
@pytest.mark.deviation("fsdp.graphs_of_former_weights")
@each_wrapping
@pytest.mark.parametrize("makes", [Headed, Forked], ids=["root", "inner"])
@any_of(
    written_cases.stepped_between,
    written_cases.stepped_between_by_a_fused_one,
    written_cases.changed_between,
    written_cases.memory_between,
)
def test_backward_with_overwritten_weights_is_refused(
    twins: Twins, does: Does, makes: Any, wrapping: Wrapping
) -> None:
    """The outermost unit stays unsharded from forward to backward, and so do all units if nothing is resharded."""
    is_refused = raises(RuntimeError, "has been modified by an inplace operation")
    twins.deviate(written, does=does, makes=makes, **wrapping, we_do=is_refused, may_agree=True)


@clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
@pytest.mark.deviation("fsdp.graphs_of_former_weights")
@each_wrapping
def test_backward_that_does_not_read_written_weights_works(twins: Twins, wrapping: Wrapping) -> None:
    does = written_cases.stepped_beside
    we_do = as_without_sharding(does, twins.world_size, Headed)
    twins.deviate(written, does=does, makes=Headed, **wrapping, we_do=we_do, may_agree=True)


@clause("distributed.fsdp.fully_sharded_data_parallel.writes.shapes")
@each_strategy
@any_of(written_cases.given_more_elements, written_cases.given_one_dimension)
def test_memory_of_another_shape(twins: Twins, does: Does, strategy: str) -> None:
    arguments = {"does": does, "strategy": strategy, "use_orig_params": True}
    actual = twins.agree(written, tolerance=TRAINED, may_raise=True, **arguments)
    is_refused = raises(RuntimeError, "Cannot writeback")(actual)
    assert is_refused is (does is written_cases.given_more_elements)


@clause("distributed.fsdp.fsdp_torch_limit_removed.waiting_gradients")
@pytest.mark.deviation("fsdp.waiting_gradients")
@each_wrapping
@any_of(
    written_cases.zeroed, written_cases.replaced_gradients, written_cases.not_reached, written_cases.moved
)
def test_gradients_that_wait_are_what_is_shown_of_them(twins: Twins, does: Does, wrapping: Wrapping) -> None:
    we_do = as_without_sharding(does, twins.world_size)
    twins.deviate(written, does=does, **wrapping, we_do=we_do, may_agree=True)


@clause("distributed.fsdp.fsdp_torch_limit_removed.others_in_their_places")
@pytest.mark.deviation("fsdp.others_in_their_places")
@each_wrapping
def test_call_with_other_parameters_is_refused(twins: Twins, wrapping: Wrapping) -> None:
    is_refused = raises(RuntimeError, "was replaced by another tensor")
    twins.deviate(written, does=written_cases.called_with_others, **wrapping, we_do=is_refused)


@clause("distributed.fsdp.fsdp_torch_limit_removed.others_in_their_places")
@pytest.mark.deviation("fsdp.others_in_their_places")
@each_strategy
def test_replaced_parameter_is_refused(twins: Twins, strategy: str) -> None:
    arguments = {"does": written_cases.given_a_parameter, "strategy": strategy, "use_orig_params": False}
    twins.deviate(
        written, **arguments, we_do=raises(RuntimeError, "body.bias was replaced by another tensor")
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.cast_between")
@pytest.mark.deviation("fsdp.cast_between")
@each_wrapping
@any_of(written_cases.cast_between, written_cases.flat_cast_between)
def test_cast_between_forward_and_backward_is_refused(twins: Twins, does: Does, wrapping: Wrapping) -> None:
    is_refused = raises(RuntimeError, "was moved or cast between its forward and its backward")
    twins.deviate(written, does=does, **wrapping, we_do=is_refused)
