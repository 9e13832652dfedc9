"""User hooks on modules and tensors, and communication hooks that replace the reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.distributed.fsdp import hook_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.lab import TREE
from conformance.distributed.fsdp.rank_judging import assert_close_gradients, unsharded_gradients
from conformance.distributed.fsdp.twins import (
    FLAT,
    Twins,
    TwinsOf,
    Wrapping,
    both_kinds,
    each,
    each_strategy,
    each_wrapping,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import Tolerance

LOW = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.modules")
@pytest.mark.parametrize("on", ["root", "unit", "wrapped"])
@each_wrapping
def test_hooks_of_modules_run_as_with_torch(twins: Twins, wrapping: Wrapping, on: str) -> None:
    twins.agree(hook_cases.hooks_of_modules, leaf_by_leaf(**wrapping), on=on)


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.modules")
@each_strategy
def test_results_of_module_hooks_are_used(twins: Twins, strategy: str) -> None:
    twins.agree(hook_cases.hooks_that_change, leaf_by_leaf(strategy))


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.tensors")
@each_wrapping
def test_hooks_of_tensors_run_as_with_torch(twins: Twins, wrapping: Wrapping) -> None:
    twins.agree(hook_cases.hooks_of_tensors, leaf_by_leaf(**wrapping))


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.parameters")
@each_strategy
def test_hooks_of_parameters_run_as_with_torch(twins: Twins, strategy: str) -> None:
    twins.agree(hook_cases.hooks_of_parameters, leaf_by_leaf(strategy))


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.gradients")
@pytest.mark.parametrize("no_sync", [False, True])
@each_strategy
def test_hooks_on_gradients_of_flat_parameters_match_torch(
    twins: Twins, strategy: str, no_sync: bool
) -> None:
    twins.agree(hook_cases.hooks_on_gradients, leaf_by_leaf(strategy), no_sync=no_sync)


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_on_gradients")
@pytest.mark.deviation("fsdp.hooks_on_gradients")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("no_sync", [False, True])
@each_strategy
def test_hooks_on_gradients_of_original_parameters_run(
    twins: Twins, strategy: str, no_sync: bool, before: bool
) -> None:
    twins.deviate(
        hook_cases.hooks_on_gradients,
        leaf_by_leaf(strategy, use_orig_params=True),
        no_sync=no_sync,
        before=before,
        torch_does=each(lambda value: not value["shapes"]),
        we_do=each(lambda value: value["are tripled"] and {*value["shapes"]} == {*value["grad shapes"]}),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.hooks_before_wrapping")
@pytest.mark.deviation("fsdp.hooks_before_wrapping")
@pytest.mark.parametrize("no_sync", [False, True])
@each_strategy
def test_hooks_on_gradients_before_wrapping_run(twins: Twins, strategy: str, no_sync: bool) -> None:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in TREE.build().named_parameters()]
    twins.deviate(
        hook_cases.hooks_on_gradients,
        leaf_by_leaf(strategy),
        no_sync=no_sync,
        before=True,
        torch_does=each(lambda value: not value["shapes"]),
        we_do=each(lambda value: value["are tripled"] and value["shapes"] == sorted(2 * shapes)),
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.replaces_the_reduction")
@pytest.mark.parametrize("no_sync", [False, True])
@both_kinds
@pytest.mark.parametrize(
    ("strategy", "hook"),
    [
        ("FULL_SHARD", "own"),
        ("FULL_SHARD", "reduce_scatter_hook"),
        ("SHARD_GRAD_OP", "own"),
        ("SHARD_GRAD_OP", "reduce_scatter_hook"),
        ("NO_SHARD", "own"),
        ("NO_SHARD", "allreduce_hook"),
    ],
)
def test_comm_hook_replaces_reduction(
    twins: Twins, strategy: str, hook: str, use_orig_params: bool, no_sync: bool
) -> None:
    if twins.is_alone and hook == "reduce_scatter_hook":
        strategy, hook = "NO_SHARD", "allreduce_hook"
    # With NO_SHARD, torch passes already reduced gradients to the hook again, which is only correct for a mean.
    backwards = 1 if hook == "own" and strategy == "NO_SHARD" and not no_sync else 2
    arguments = {"hook": hook, "backwards": backwards, "no_sync": no_sync}
    twins.agree(hook_cases.comm_hook, leaf_by_leaf(strategy, use_orig_params), **arguments)


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.low_precision")
@pytest.mark.reference_limit("fsdp.low_precision_comm_hooks")
def test_torch_cannot_run_low_precision_hooks_on_a_cpu(torch_cannot: Callable[..., None]) -> None:
    torch_cannot(hook_cases.comm_hook, hook="bf16_compress_hook")


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.low_precision")
@pytest.mark.parametrize("hook", LOW)
@each_strategy
def test_low_precision_hooks_round_and_average(twins: Twins, strategy: str, hook: str) -> None:
    setup = leaf_by_leaf(strategy)
    tolerance = Tolerance(
        4, "each gradient, the sum over the ranks and the quotient rounded", LOW[hook], terms=0.1
    )
    for rank, value in enumerate(twins.values(hook_cases.comm_hook, setup, hook=hook)):
        whole = value["whole"]
        assert {state.dtype for state in whole.values()} == {torch.float32}
        assert all(torch.equal(s.values, s.values.to(LOW[hook]).float()) for s in whole.values())
        assert_close_gradients(unsharded_gradients(setup, twins.world_size, rank), whole, tolerance)


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.refused")
@pytest.mark.parametrize("why", ["an inner unit", "twice", "no callable"])
def test_hooks_are_refused(twins: Twins, why: str) -> None:
    assert "Error" in str(twins.agree(hook_cases.comm_hook_refused, FLAT, why=why)[0].value)


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.refused")
@pytest.mark.parametrize("why", ["replicas", "replicas of a part"])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hooks_are_refused_with_replicas(twins_of: TwinsOf, strategy: str, why: str) -> None:
    setup = Setup(strategy, ranks="meshes", shards=2)
    outcomes = twins_of(2).agree(hook_cases.comm_hook_refused, setup, why=why)
    assert "hybrid strategies" in str(outcomes[0].value)
