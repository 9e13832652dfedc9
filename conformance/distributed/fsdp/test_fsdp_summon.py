"""summon_full_params: whole parameters inside, shards outside, and what is kept of changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.clauses import clause
from conformance.deviations import StaleRow
from conformance.distributed.fsdp import summon_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import (
    assert_probes_agree,
    assert_ranks_agree,
    probed,
    share_of_examples,
)
from conformance.distributed.fsdp.method_cases import TREE
from conformance.library import Library
from conformance.ranks import RankFault, RankPool
from conformance.results import unavailable

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
ORIGINALS = {"use_orig_params": True}
leaf_by_leaf = [Setup(strategy, wrap="leaves", arguments=ORIGINALS) for strategy in STRATEGIES]

options = st.fixed_dictionaries(
    {},
    optional={name: st.booleans() for name in ("recurse", "writeback", "rank0_only", "with_grads")},
)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.options")
@pytest.mark.parametrize("strategy", STRATEGIES)
@share_of_examples(0.7)
@given(
    options=options,
    use_orig_params=st.booleans(),
    at=st.sampled_from([0, 0, 1]),
    adds=st.sampled_from([0.0, 0.5]),
)
def test_every_option(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    options: Mapping[str, bool],
    use_orig_params: bool,
    at: int,
    adds: float,
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    assert_probes_agree(
        rank_pool, (reference, subject), summon_cases.summon, setup, options=options, at=at, adds=adds
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.whole")
@pytest.mark.parametrize("setup", leaf_by_leaf, ids=STRATEGIES)
def test_parameters_are_whole_and_named_as_before_wrapping(
    subject: Library, rank_pool: RankPool, setup: Setup
) -> None:
    plain = {name: parameter.detach() for name, parameter in TREE.build().named_parameters()}
    for outcome in probed(rank_pool, subject, summon_cases.whole, setup, options={"with_grads": True}):
        assert outcome.raised is None, outcome.raised
        assert list(outcome.value) == list(plain)
        for name, seen in outcome.value.items():
            assert torch.equal(seen["value"].values, plain[name]), name
            assert seen["grad"].values.shape == plain[name].shape


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.writeback")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_changed_inside_is_trained_on(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    seen = assert_probes_agree(rank_pool, (reference, subject), summon_cases.trains_on, setup)
    assert all(outcome.raised is None for outcome in seen)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.refused")
@pytest.mark.parametrize(
    "asks",
    [summon_cases.summon_in_summon, summon_cases.summon_in_forward, summon_cases.summon_in_backward],
    ids=lambda asks: asks.__name__,
)
def test_is_refused_where_parameters_are_in_use(
    subject: Library, reference: Library, rank_pool: RankPool, asks: Any
) -> None:
    seen = assert_probes_agree(rank_pool, (reference, subject), asks, Setup(wrap="leaves"))
    assert "AssertionError" in str(seen[0].value)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.restores")
@pytest.mark.parametrize(
    "asks",
    [summon_cases.restores_after_an_error, summon_cases.of_plain_modules],
    ids=lambda asks: asks.__name__,
)
@pytest.mark.parametrize("setup", leaf_by_leaf, ids=STRATEGIES)
def test_leaves_shards_behind(
    subject: Library, reference: Library, rank_pool: RankPool, setup: Setup, asks: Any
) -> None:
    assert_probes_agree(rank_pool, (reference, subject), asks, setup)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.offload_to_cpu")
@pytest.mark.reference_limit("fsdp.summon_offloaded_to_cpu")
def test_torch_cannot_offload_on_a_cpu() -> None:
    """One rank alone is NO_SHARD, which is refused; two fail on freeing what they gathered."""
    torch_ = Library("torch")
    for world_size in (1, 2):
        with RankPool(world_size) as pool:
            try:
                seen = probed(
                    pool,
                    torch_,
                    summon_cases.whole,
                    Setup(),
                    options={"offload_to_cpu": True, "writeback": False},
                )
            except RankFault:
                continue
            if all(outcome.raised is None for outcome in seen):
                raise StaleRow("torch offloads what is summoned on a CPU")


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.offload_to_cpu")
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_offloads_what_it_gathers(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    use_orig_params: bool,
    rank0_only: bool,
) -> None:
    """Beside the warning that it costs memory, as without the option."""
    if subject.package == "torch" or rank_pool.world_size == 1:
        unavailable("the reference cannot run here: fsdp.summon_offloaded_to_cpu")
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    options = {"writeback": False, "rank0_only": rank0_only}
    wanted = probed(rank_pool, reference, summon_cases.whole, setup, options=options)
    got = probed(rank_pool, subject, summon_cases.whole, setup, options=options | {"offload_to_cpu": True})
    for outcome in got:
        assert any("may result in" in text for _, text in outcome.warned) is not rank0_only, outcome.warned
    assert_ranks_agree(wanted, [_without_warnings(outcome) for outcome in got])


def _without_warnings(outcome: Any) -> Any:
    return type(outcome)(outcome.value, outcome.watched, outcome.raised, (), outcome.left_changed)
