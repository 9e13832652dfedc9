"""Gradients that are differentiated: those of inputs can be, those of parameters are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.clauses import clause
from conformance.deviations import DeviationJudge
from conformance.distributed.fsdp.double_backward_cases import Penalty, penalized_unsharded
from conformance.distributed.fsdp.judging import outcomes
from conformance.distributed.fsdp.test_fsdp_lifted import Seen, have_whole, raised
from conformance.library import Library
from conformance.ranks import RankPool

Ranks = Callable[..., RankPool]


ONCE, WITH_A_LOSS = Penalty(), Penalty(adds_loss=True)


def has_penalized(seen: Seen, freezes: bool, penalty: Penalty) -> bool:
    return have_whole(seen, penalized_unsharded(len(seen), freezes, penalty))


@clause("distributed.fsdp.fsdp_lifted.gradient_penalty")
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
    strategy: str,
    use_orig_params: bool,
    freezes: bool,
    penalty: Penalty,
) -> None:
    deviation.judge(
        lambda library: outcomes(
            ranks(2),
            library,
            "double_backward_cases:penalized",
            strategy=strategy,
            use_orig_params=use_orig_params,
            freezes=freezes,
            penalty=penalty,
        ),
        torch_does=lambda seen: not has_penalized(seen, freezes, penalty),
        we_do=lambda seen: has_penalized(seen, freezes, penalty),
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.gradients_of_gradients")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_of_parameters_cannot_be_differentiated(
    subject: Library, ranks: Ranks, use_orig_params: bool
) -> None:
    seen = outcomes(
        ranks(2), subject, "double_backward_cases:gradients_with_a_graph", use_orig_params=use_orig_params
    )
    assert raised(seen, RuntimeError, "FSDP does not support gradients of gradients"), seen
