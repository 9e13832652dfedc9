"""Transforms of torch.func and functional_call over sharded models."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.distributed.fsdp import fully_shard_functional_cases as functional_cases
from conformance.distributed.fsdp import transform_cases as cases
from conformance.distributed.fsdp.fully_shard_judging import Sites
from conformance.distributed.fsdp.twins import Twins, each
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.judgement import unavailable
from conformance.judge.surface import is_torch_in

differentiable_or_not = pytest.mark.parametrize("differentiable", [False, True])
resharded_or_not = pytest.mark.parametrize("reshards", [False, True])


def _is_like_unsharded(pair: list[dict[str, Any]]) -> bool:
    sharded, plain = pair
    return does_as(plain, sharded)


def _judge_transform(sites: Sites, **arguments: Any) -> None:
    sites.deviate(cases.through_fully_shard, we_do=each(_is_like_unsharded), **arguments)


@clause("distributed.fsdp.fully_shard.backward_after_transforms")
@pytest.mark.deviation("fully_shard.backward_after_forward_transforms")
@resharded_or_not
@differentiable_or_not
@pytest.mark.parametrize("name", cases.FORWARD)
def test_backward_after_forward_transform_reaches_parameters(
    sites: Sites, name: str, differentiable: bool, reshards: bool
) -> None:
    _judge_transform(sites, name=name, differentiable=differentiable, reshards=reshards)


@clause("distributed.fsdp.fully_shard.backward_after_transforms")
@pytest.mark.deviation("fully_shard.backward_after_transforms")
@resharded_or_not
@differentiable_or_not
@pytest.mark.parametrize("name", cases.REVERSE)
def test_backward_after_reverse_transform_reaches_parameters(
    sites: Sites, name: str, differentiable: bool, reshards: bool
) -> None:
    _judge_transform(sites, name=name, differentiable=differentiable, reshards=reshards, may_fault=True)


@clause("distributed.fsdp.fsdp_torch_limit_removed.backward_after_transforms")
@pytest.mark.deviation("fsdp.backward_after_transforms")
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"), [("FULL_SHARD", True), ("FULL_SHARD", False), ("SHARD_GRAD_OP", True)]
)
@pytest.mark.parametrize("name", ["vmap", "grad", "hessian"])
def test_backward_after_transform_reaches_flat_parameters(
    twins: Twins, name: str, strategy: str, use_orig_params: bool
) -> None:
    twins.deviate(
        cases.through_flat,
        name=name,
        differentiable=True,
        strategy=strategy,
        use_orig_params=use_orig_params,
        we_do=each(_is_like_unsharded),
        may_agree=twins.is_alone,
        may_fault=True,
    )


@clause("distributed.fsdp.fully_shard.functional_call")
@pytest.mark.deviation("fully_shard.functional_call")
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("how", "inner_steps"), [("sharded", 0), ("sharded", 1), ("whole", 0), ("whole", 1)])
def test_functional_call_computes_with_given_tensors(
    sites: Sites, how: str, inner_steps: int, keeps: bool
) -> None:
    if how == "sharded" and inner_steps and is_torch_in("<2.13"):
        unavailable("a DTensor has no second derivatives in torch 2.11")
    sites.deviate(
        functional_cases.substituted,
        how=how,
        keeps=keeps,
        inner_steps=inner_steps,
        we_do=each(_is_like_unsharded),
        may_agree=keeps and how == "whole",
    )


def _is_linearized_like_unsharded(pair: list[list[Any]]) -> bool:
    sharded, plain = pair
    return does_as(plain, sharded)


@clause("distributed.fsdp.fully_shard.linearize")
@pytest.mark.deviation("fully_shard.linearize")
@resharded_or_not
def test_linearize_gives_the_derivative_of_unsharded_model(sites: Sites, reshards: bool) -> None:
    sites.deviate(cases.linearized, reshards=reshards, we_do=each(_is_linearized_like_unsharded))


@clause("distributed.fsdp.fsdp_torch_limit_removed.linearize")
@pytest.mark.deviation("fsdp.linearize")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_linearize_gives_the_derivative_of_flat_model(twins: Twins, strategy: str) -> None:
    twins.deviate(cases.linearized_flat, strategy=strategy, we_do=each(_is_linearized_like_unsharded))


@clause("distributed.fsdp.fully_shard.unseen_gradients")
@pytest.mark.deviation("fully_shard.unseen_gradients")
@pytest.mark.parametrize("then", ["forward", "step"])
def test_gradients_of_unseen_backward_are_an_error(sites: Sites, then: str) -> None:
    sites.deviate(
        cases.unseen_gradients,
        then=then,
        torch_does=each(lambda error: not isinstance(error, str)),
        we_do=each(lambda error: isinstance(error, str) and "RuntimeError: _Hiding" in error),
    )
