"""Hooks: those that users register on modules and tensors, and those that take the place of the reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.distributed.fsdp import hook_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import (
    assert_close_gradients,
    assert_probes_agree,
    probed,
    unsharded_gradients,
)
from conformance.judge.clauses import clause
from conformance.judge.deviations import StaleRow
from conformance.judge.library import Library
from conformance.judge.tolerances import Tolerance
from conformance.ranks import RankFault, RankPool

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
LOW = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.modules")
@pytest.mark.parametrize("on", ["root", "unit", "wrapped"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_of_modules_run_as_with_torch(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    use_orig_params: bool,
    on: str,
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    assert_probes_agree(rank_pool, (reference, subject), hook_cases.hooks_of_modules, setup, on=on)


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.modules")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_hooks_of_modules_return_counts(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str
) -> None:
    setup = Setup(strategy, wrap="leaves")
    assert_probes_agree(rank_pool, (reference, subject), hook_cases.hooks_that_change, setup)


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.tensors")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_of_tensors_run_as_with_torch(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    assert_probes_agree(rank_pool, (reference, subject), hook_cases.hooks_of_tensors, setup)


@clause("distributed.fsdp.fully_sharded_data_parallel.hooks.parameters")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_of_parameters_run_as_with_torch(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str
) -> None:
    setup = Setup(strategy, wrap="leaves")
    assert_probes_agree(rank_pool, (reference, subject), hook_cases.hooks_of_parameters, setup)


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.replaces_the_reduction")
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
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
def test_a_hook_replaces_the_reduction(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    hook: str,
    use_orig_params: bool,
    no_sync: bool,
) -> None:
    if rank_pool.world_size == 1 and hook == "reduce_scatter_hook":
        strategy, hook = "NO_SHARD", "allreduce_hook"
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    # Without sharding torch hands a hook what was reduced before once more, which only a mean survives.
    backwards = 1 if hook == "own" and strategy == "NO_SHARD" and not no_sync else 2
    arguments = {"hook": hook, "backwards": backwards, "no_sync": no_sync}
    seen = assert_probes_agree(rank_pool, (reference, subject), hook_cases.comm_hook, setup, **arguments)
    assert all(outcome.raised is None for outcome in seen), seen[0].raised


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.low_precision")
@pytest.mark.reference_limit("fsdp.low_precision_comm_hooks")
def test_torch_cannot_run_low_precision_hooks_on_a_cpu() -> None:
    with RankPool(2) as pool:
        try:
            seen = probed(pool, Library("torch"), hook_cases.comm_hook, Setup(), hook="bf16_compress_hook")
        except RankFault:
            return
        if all(outcome.raised is None for outcome in seen):
            raise StaleRow("torch runs low-precision hooks on a CPU")


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.low_precision")
@pytest.mark.parametrize("hook", LOW)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_low_precision_hooks_round_and_average(
    subject: Library, rank_pool: RankPool, strategy: str, hook: str
) -> None:
    setup = Setup(strategy, wrap="leaves")
    seen = probed(rank_pool, subject, hook_cases.comm_hook, setup, hook=hook)
    tolerance = Tolerance(
        4, "each gradient, the sum over the ranks and the quotient rounded", LOW[hook], terms=0.1
    )
    for rank, outcome in enumerate(seen):
        assert outcome.raised is None, outcome.raised
        whole = outcome.value["whole"]
        assert {state.dtype for state in whole.values()} == {torch.float32}
        assert all(torch.equal(s.values, s.values.to(LOW[hook]).float()) for s in whole.values())
        assert_close_gradients(unsharded_gradients(setup, len(seen), rank), whole, tolerance)


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.refused")
@pytest.mark.parametrize("why", ["an inner unit", "twice", "no callable"])
def test_hooks_are_refused(subject: Library, reference: Library, rank_pool: RankPool, why: str) -> None:
    setup = Setup(wrap="leaves")
    seen = assert_probes_agree(rank_pool, (reference, subject), hook_cases.comm_hook_refused, setup, why=why)
    assert "Error" in str(seen[0].value)


@clause("distributed.fsdp.fully_sharded_data_parallel.register_comm_hook.refused")
@pytest.mark.parametrize("why", ["replicas", "replicas of a part"])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hooks_are_refused_with_replicas(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], strategy: str, why: str
) -> None:
    setup = Setup(strategy, ranks="meshes", shards=2)
    seen = assert_probes_agree(ranks(2), (reference, subject), hook_cases.comm_hook_refused, setup, why=why)
    assert "hybrid strategies" in str(seen[0].value)
