"""Double backward: gradients of inputs can be differentiated, and differentiating gradients of parameters raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import double_backward_cases as cases
from conformance.distributed.fsdp.double_backward_cases import Penalty
from conformance.distributed.fsdp.rank_judging import assert_all_close, assert_close_gradients
from conformance.distributed.fsdp.twins import Twins, both_kinds, each, holds, raises
from conformance.judge.clauses import clause
from conformance.judge.tolerances import ONE_STEP

ONCE, WITH_A_LOSS = Penalty(), Penalty(adds_loss=True)


@clause("distributed.fsdp.fsdp_torch_limit_removed.gradient_penalty")
@pytest.mark.deviation("fsdp.gradient_penalty")
@both_kinds
@pytest.mark.parametrize(
    ("strategy", "freezes", "penalty"),
    [
        ("FULL_SHARD", False, ONCE),
        ("FULL_SHARD", True, WITH_A_LOSS),
        ("FULL_SHARD", False, Penalty(order=2)),
        ("FULL_SHARD", True, Penalty(order=3, inputs=2)),
        ("SHARD_GRAD_OP", False, ONCE),
        ("SHARD_GRAD_OP", False, Penalty(order=2, inputs=2)),
        ("NO_SHARD", False, ONCE),
    ],
)
def test_gradient_of_input_can_be_differentiated(
    cpu_twins: Twins, strategy: str, use_orig_params: bool, freezes: bool, penalty: Penalty
) -> None:
    expected = cases.penalized_unsharded(cpu_twins.world_size, freezes, penalty)
    cpu_twins.deviate(
        cases.penalized,
        strategy=strategy,
        use_orig_params=use_orig_params,
        freezes=freezes,
        penalty=penalty,
        we_do=each(lambda value: holds(assert_close_gradients, expected, value["whole"], ONE_STEP)),
        may_agree=cpu_twins.is_alone,
    )


def are(expected: list[torch.Tensor]) -> Any:
    return each(lambda value: holds(assert_all_close, "what was returned", expected, value, ONE_STEP))


@clause("distributed.fsdp.fsdp_torch_limit_removed.gradient_penalty")
@pytest.mark.deviation("fsdp.gradient_penalty")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_leaf_that_starts_gradients_may_be_kept(cpu_twins: Twins, strategy: str) -> None:
    expected = cases.directional_derivatives(cases.built(freezes=False), torch.ones(2, 3))
    cpu_twins.deviate(
        cases.differentiated_along, strategy=strategy, we_do=are(expected), may_agree=cpu_twins.is_alone
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.gradient_penalty")
def test_input_may_be_used_elsewhere_on_one_rank(cpu_twins: Twins) -> None:
    with torch.no_grad():
        expected = cases.built(freezes=False)(torch.linspace(-1, 1, 6).view(2, 3))
    outcomes = cpu_twins.of_subject(cases.input_used_elsewhere)
    assert are([expected])(outcomes), outcomes


@clause("distributed.fsdp.fully_sharded_data_parallel.gradients_of_gradients")
@both_kinds
def test_gradients_of_parameters_cannot_be_differentiated(cpu_twins: Twins, use_orig_params: bool) -> None:
    outcomes = cpu_twins.of_subject(cases.gradients_with_a_graph, use_orig_params=use_orig_params)
    assert raises(RuntimeError, "FSDP does not support gradients of gradients")(outcomes), outcomes
