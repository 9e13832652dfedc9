"""The dtypes in which gradients accumulate and are reduced, compared bit by bit for both APIs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import reduction_dtype_cases as cases
from conformance.distributed.fsdp.fully_shard_judging import Sites
from conformance.distributed.fsdp.reduction_dtype_cases import FULL, LOW, POLICIES, Dtypes, Layers, Policy
from conformance.distributed.fsdp.twins import RankOutcomes, Twins, TwinsOf, each, holds, values_of
from conformance.judge.clauses import clause
from conformance.judge.surface import is_torch_in
from conformance.judge.tolerances import EXACT

_FOLLOWS_PARAM = is_torch_in(">=2.15")
each_layers = pytest.mark.parametrize(
    "layers",
    [Layers(are_units=True), Layers((0,)), Layers((0,), are_units=True), Layers((1,), are_units=True)],
    ids=["units", "first frozen", "first unit frozen", "last unit frozen"],
)


def _of_fully_shard(policy: Policy) -> Dtypes:
    computed, reduced = policy[0] or FULL, policy[1]
    reduced = reduced or (FULL if _FOLLOWS_PARAM else computed)
    return Dtypes(computed, reduced, reduced, rounds_before_sum=_FOLLOWS_PARAM)


def _of_fsdp(policy: Policy) -> Dtypes:
    computed = policy[0] or FULL
    return Dtypes(computed, computed, policy[1] or computed)


def _assert_rounded(outcomes: RankOutcomes, dtypes_of: Callable[[Policy], Dtypes], schedule: str) -> None:
    for name, policy in POLICIES.items():
        dtypes = dtypes_of(policy)
        expected = cases.expected_gradient(dtypes, len(outcomes), schedule)
        for gradients in values_of(outcomes):
            for gradient in gradients[name]:
                assert gradient.values.dtype is dtypes.shown
                assert torch.equal(gradient.values.double(), expected), f"{name}: not rounded by {dtypes}"


@clause("distributed.fsdp.fully_shard.reduction_dtype")
@pytest.mark.parametrize(
    ("schedule", "replicates"),
    [("one", False), ("accumulated", False), ("accumulated", True)],
    ids=["sharded", "accumulated", "replicated"],
)
def test_fully_shard_rounds_by_its_policy(sites: Sites, schedule: str, replicates: bool) -> None:
    outcomes = sites.agree(cases.of_fully_shard, tolerance=EXACT, schedule=schedule, replicates=replicates)
    _assert_rounded(outcomes, _of_fully_shard, schedule)


@clause("distributed.fsdp.fully_shard.reduction_dtype")
@each_layers
def test_fully_shard_rounds_alike_beside_frozen_parameters(sites: Sites, layers: Layers) -> None:
    arguments: dict[str, Any] = {"schedule": "accumulated", "replicates": False, "layers": layers}
    outcomes = sites.agree(cases.of_fully_shard, tolerance=EXACT, **arguments)
    _assert_rounded(outcomes, _of_fully_shard, "accumulated")


@clause("distributed.fsdp.fully_shard.finalization_dtype")
@pytest.mark.deviation("fully_shard.finalization_dtype")
@pytest.mark.parametrize("replicates", [False, True], ids=["sharded", "replicated"])
def test_backwards_before_finalization_accumulate_like_unsynchronised_ones(
    sites: Sites, replicates: bool
) -> None:
    def is_rounded_by(dtypes_of: Callable[[Policy], Dtypes]) -> Callable[[RankOutcomes], bool]:
        return lambda outcomes: holds(_assert_rounded, outcomes, dtypes_of, "accumulated")

    def in_param_dtype(policy: Policy) -> Dtypes:
        dtypes = _of_fully_shard(policy)
        return dtypes if policy[0] is None else replace(dtypes, accumulated=policy[0])

    sites.deviate(
        cases.of_fully_shard,
        schedule="finalized",
        replicates=replicates,
        we_do=is_rounded_by(_of_fully_shard),
        torch_does=is_rounded_by(in_param_dtype),
    )


@clause("distributed.fsdp.fully_shard.reduction_dtype")
def test_replicas_add_up_in_the_reduction_dtype(sites_of: TwinsOf) -> None:
    outcomes = sites_of(2).agree(cases.of_fully_shard, tolerance=EXACT, schedule="deferred", replicates=True)
    _assert_rounded(outcomes, _of_fully_shard, "deferred")


@clause("distributed.fsdp.fully_shard.tensor_parallel_reduction_dtype")
def test_tensor_parallelism_sums_gradients_in_their_dtype(sites_of: TwinsOf) -> None:
    outcomes = sites_of(2).agree(cases.of_tensor_parallelism, tolerance=EXACT)
    for name, policy in POLICIES.items():
        dtypes = _of_fully_shard(policy)
        summed = dtypes.accumulated if _FOLLOWS_PARAM else dtypes.computed
        expected = cases.expected_of_tensor_parallelism(summed, dtypes, len(outcomes))
        for gradients in values_of(outcomes):
            assert torch.equal(gradients[name].values.double(), expected), f"{name}: not summed in {summed}"


@clause("distributed.fsdp.fully_shard.grad_dtype")
@pytest.mark.parametrize("schedule", ["one", "accumulated"])
def test_gradients_follow_grad_dtype_of_each_parameter(sites: Sites, schedule: str) -> None:
    if _FOLLOWS_PARAM:
        outcomes = sites.agree(cases.of_grad_dtype, tolerance=EXACT, schedule=schedule)
    else:  # torch ignores `grad_dtype`
        outcomes = sites.of_subject(cases.of_grad_dtype, schedule=schedule)
    dtypes = (Dtypes(LOW, FULL, FULL, FULL), Dtypes(LOW, LOW, FULL, LOW))
    for gradients in values_of(outcomes):
        for gradient, expected_by in zip(gradients, dtypes, strict=True):
            expected = cases.expected_gradient(expected_by, len(outcomes), schedule)
            assert gradient.values.dtype is expected_by.shown
            assert torch.equal(gradient.values.double(), expected), expected_by


@clause("distributed.fsdp.fully_shard.grad_dtype_kept")
@pytest.mark.parametrize(("changes", "own"), [("cast", torch.float16), ("assigned", LOW)])
def test_grad_dtype_outlives_changes_of_parameters(sites: Sites, changes: str, own: torch.dtype) -> None:
    if _FOLLOWS_PARAM:
        sites.agree(cases.of_kept_grad_dtype, tolerance=EXACT, changes=changes)
    for dtypes in values_of(sites.of_subject(cases.of_kept_grad_dtype, changes=changes)):
        assert dtypes == [str(FULL), str(own)]


@clause("distributed.fsdp.fully_shard.grad_dtype")
@pytest.mark.parametrize("reduce_dtype", [None, FULL], ids=str)
def test_zeros_for_unused_parameters_need_one_dtype(sites: Sites, reduce_dtype: torch.dtype | None) -> None:
    if _FOLLOWS_PARAM:
        sites.agree(cases.of_unused_with_any_dtype, tolerance=EXACT, reduce_dtype=reduce_dtype)
    for error, _ in values_of(sites.of_subject(cases.of_unused_with_any_dtype, reduce_dtype=reduce_dtype)):
        assert (error is None) == (reduce_dtype is not None)
        assert (
            error is None or "grad_dtype=None requires an explicit MixedPrecisionPolicy.reduce_dtype" in error
        )


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.reduction_dtype")
@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [
        ("FULL_SHARD", "one"),
        ("FULL_SHARD", "accumulated"),
        ("NO_SHARD", "one"),
        ("NO_SHARD", "accumulated"),
    ],
)
def test_fsdp_rounds_by_its_mixed_precision(twins: Twins, strategy: str, schedule: str) -> None:
    outcomes = twins.agree(cases.of_fsdp, tolerance=EXACT, schedule=schedule, strategy=strategy)
    _assert_rounded(outcomes, _of_fsdp, schedule)


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.reduction_dtype")
@each_layers
def test_fsdp_rounds_alike_beside_frozen_parameters(twins: Twins, layers: Layers) -> None:
    arguments: dict[str, Any] = {"schedule": "accumulated", "strategy": "FULL_SHARD", "layers": layers}
    outcomes = twins.agree(cases.of_fsdp, tolerance=EXACT, **arguments)
    _assert_rounded(outcomes, _of_fsdp, "accumulated")


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.existing_gradients")
@pytest.mark.deviation("fsdp.existing_gradients_rounded")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_existing_gradients_keep_their_precision(twins: Twins, strategy: str) -> None:
    added = cases.expected_gradient(_of_fsdp((LOW, None)), twins.world_size, "one").float()
    twins.deviate(
        cases.of_existing_gradient,
        strategy=strategy,
        torch_does=each(lambda gradient: torch.equal(gradient.values, gradient.values.to(LOW).float())),
        we_do=each(lambda gradient: torch.equal(gradient.values, added + 1 / 3)),
        may_agree=strategy == "FULL_SHARD" and not twins.is_alone,
    )
