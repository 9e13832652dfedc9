"""Gradients that are differentiated: those of inputs can be, those of parameters are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp.double_backward_cases import (
    Penalty,
    built,
    directional_derivatives,
    penalized_unsharded,
)
from conformance.distributed.fsdp.judging import outcomes
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import Seen, have_whole, raised
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.tolerances import ONE_STEP
from conformance.ranks import RankPool

Ranks = Callable[..., RankPool]


def gave(seen: Seen, expected: list[torch.Tensor]) -> bool:
    return all(
        outcome.raised is None
        and all(
            ONE_STEP.excess(want, actual.values) is None
            for want, actual in zip(expected, _listed(outcome.value), strict=True)
        )
        for outcome in seen
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


ONCE, WITH_A_LOSS = Penalty(), Penalty(adds_loss=True)


def has_penalized(seen: Seen, freezes: bool, penalty: Penalty) -> bool:
    return have_whole(seen, penalized_unsharded(len(seen), freezes, penalty))


@clause("distributed.fsdp.fsdp_torch_limit_removed.gradient_penalty")
@pytest.mark.deviation("fsdp.gradient_penalty")
@pytest.mark.parametrize("use_orig_params", [False, True])
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
def test_the_gradient_of_an_input_can_be_differentiated(
    deviation: DeviationJudge,
    ranks: Ranks,
    world_size: int,
    strategy: str,
    use_orig_params: bool,
    freezes: bool,
    penalty: Penalty,
) -> None:
    deviation.judge(
        lambda library: outcomes(
            ranks(world_size),
            library,
            "double_backward_cases:penalized",
            strategy=strategy,
            use_orig_params=use_orig_params,
            freezes=freezes,
            penalty=penalty,
        ),
        we_do=lambda seen: has_penalized(seen, freezes, penalty),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.gradient_penalty")
@pytest.mark.deviation("fsdp.gradient_penalty")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_leaf_that_gradients_begin_with_may_be_kept(
    deviation: DeviationJudge, ranks: Ranks, world_size: int, strategy: str
) -> None:
    expected = directional_derivatives(built(freezes=False), torch.ones(2, 3))
    deviation.judge(
        lambda library: outcomes(
            ranks(world_size), library, "double_backward_cases:differentiated_along", strategy=strategy
        ),
        we_do=lambda seen: gave(seen, expected),
        may_agree=world_size == 1,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.gradient_penalty")
def test_what_was_an_input_may_be_used_elsewhere_on_one_rank(
    subject: Library, ranks: Ranks, world_size: int
) -> None:
    with torch.no_grad():
        expected = built(freezes=False)(torch.linspace(-1, 1, 6).view(2, 3))
    seen = outcomes(ranks(world_size), subject, "double_backward_cases:input_used_elsewhere")
    assert gave(seen, [expected]), seen


@clause("distributed.fsdp.fully_sharded_data_parallel.gradients_of_gradients")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_of_parameters_cannot_be_differentiated(
    subject: Library, ranks: Ranks, world_size: int, use_orig_params: bool
) -> None:
    seen = outcomes(
        ranks(world_size),
        subject,
        "double_backward_cases:gradients_with_a_graph",
        use_orig_params=use_orig_params,
    )
    assert raised(seen, RuntimeError, "FSDP does not support gradients of gradients"), seen
