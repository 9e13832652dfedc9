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

differentiable_or_not = pytest.mark.parametrize("differentiable", [False, True])
resharded_or_not = pytest.mark.parametrize("reshards", [False, True])


def _is_like_unsharded(pair: list[dict[str, Any]]) -> bool:
    sharded, plain = pair
    return does_as(plain, sharded)


@clause("distributed.fsdp.fully_shard.backward_after_transforms")
@resharded_or_not
@differentiable_or_not
@pytest.mark.parametrize("name", cases.FORWARD)
def test_backward_after_forward_transform_reaches_parameters(
    sites: Sites, name: str, differentiable: bool, reshards: bool
) -> None:
    seen = sites.agree(cases.through_fully_shard, name=name, differentiable=differentiable, reshards=reshards)
    assert each(_is_like_unsharded)(seen), seen


@clause("distributed.fsdp.fully_shard.backward_after_transforms")
@pytest.mark.deviation("fully_shard.backward_after_transforms")
@resharded_or_not
@differentiable_or_not
@pytest.mark.parametrize("name", cases.REVERSE)
def test_backward_after_reverse_transform_reaches_parameters(
    sites: Sites, name: str, differentiable: bool, reshards: bool
) -> None:
    sites.deviate(
        cases.through_fully_shard,
        name=name,
        differentiable=differentiable,
        reshards=reshards,
        we_do=each(_is_like_unsharded),
        may_fault=True,
    )


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
    sites.deviate(
        functional_cases.substituted,
        how=how,
        keeps=keeps,
        inner_steps=inner_steps,
        we_do=each(_is_like_unsharded),
        may_agree=keeps and how == "whole",
    )
