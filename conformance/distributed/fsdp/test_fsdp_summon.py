"""summon_full_params: whole parameters inside, shards outside, and what is kept of changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.distributed.fsdp import summon_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.judging import (
    assert_probes_agree,
    assert_ranks_agree,
    probed,
    share_of_examples,
)
from conformance.distributed.fsdp.method_cases import SIMPLE, TREE
from conformance.distributed.fsdp.module_trees import call, out_of_form
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import raised
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge, StaleRow
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import ONE_STEP
from conformance.ranks import RankFault, RankPool

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
@example(options={"with_grads": True}, use_orig_params=True, at=0, adds=0.5)
@example(
    options={"with_grads": True, "rank0_only": True, "writeback": False}, use_orig_params=True, at=0, adds=0.0
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


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.computes")
@pytest.mark.parametrize("by", ["unit", "module"])
@pytest.mark.parametrize("backward", ["", "inside", "after"])
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_inside(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    recurse: bool,
    backward: str,
    by: str,
) -> None:
    """Without a backward of the module that is wrapped: its own parameters would get gradients of this rank alone."""
    setup = Setup(strategy, wrap="leaves", arguments=ORIGINALS)
    asked = {"options": {"recurse": recurse, "writeback": False}, "by": by}
    asked["backward"] = backward if by == "unit" else ""
    expected, actual = (
        probed(rank_pool, library, summon_cases.computes, setup, tree=SIMPLE, **asked)
        for library in (reference, subject)
    )
    assert_ranks_agree(*map(_without_shapes, (expected, actual)), ONE_STEP)
    assert actual[0].raised is None, actual[0].raised


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.computes")
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_forward_of_inner_units_inside(
    subject: Library, reference: Library, rank_pool: RankPool, use_orig_params: bool, writeback: bool
) -> None:
    """Of the outermost unit alone is shown what it has, as for a model that generates."""
    setup = Setup(wrap="leaves", arguments={"use_orig_params": use_orig_params})
    options = {"recurse": False, "writeback": writeback}
    asked = {"options": options, "by": "module", "adds": 0.5 if writeback else 0.0}
    asks, libraries = summon_cases.computes, (reference, subject)
    seen = assert_probes_agree(rank_pool, libraries, asks, setup, tree=SIMPLE, **asked)
    assert seen[0].raised is None, seen[0].raised


def _without_shapes(seen: list[Outcome]) -> list[Outcome]:
    """What is shown behind a forward: torch's units show shards there."""
    return [
        outcome if outcome.raised else replace(outcome, value=outcome.value | {"inside": None})
        for outcome in seen
    ]


@clause("distributed.fsdp.fsdp_torch_limit_removed.computes_while_summoned")
@pytest.mark.deviation("fsdp.computes_while_summoned")
@pytest.mark.parametrize("backward", ["", "inside", "after"])
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_inside_leaves_whole_what_is_shown(
    deviation: DeviationJudge,
    rank_pool: RankPool,
    strategy: str,
    use_orig_params: bool,
    writeback: bool,
    backward: str,
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    adds = 0.5 if writeback else 0.0
    asked = {"options": {"writeback": writeback}, "backward": backward, "adds": adds}
    with torch.no_grad():
        model = SIMPLE.build()
        for parameter in model.parameters():
            parameter.add_(adds)
    plain = dict(model.named_parameters())

    def is_right(seen: list[Outcome]) -> bool:
        return all(
            outcome.raised is None
            and outcome.value["inside"] == [parameter.shape for parameter in plain.values()]
            and all(torch.equal(outcome.value["whole"][name].values, each) for name, each in plain.items())
            and _is_close(call(model, SIMPLE, SIMPLE.batch(0, rank)), outcome.value["output"].values)
            for rank, outcome in enumerate(seen)
        )

    deviation.judge(
        lambda library: probed(rank_pool, library, summon_cases.computes, setup, tree=SIMPLE, **asked),
        we_do=is_right,
        may_agree=not writeback or strategy == "NO_SHARD" or rank_pool.world_size == 1,
    )


def _is_close(expected: Any, actual: torch.Tensor) -> bool:
    return ONE_STEP.excess(out_of_form(expected).detach(), actual) is None


@clause("distributed.fsdp.fsdp_torch_limit_removed.computes_while_summoned")
@pytest.mark.deviation("fsdp.computes_while_summoned")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_inside_has_mixed_precision(
    deviation: DeviationJudge, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    arguments = {"use_orig_params": use_orig_params}
    precision = {"param_dtype": torch.bfloat16}
    setup = Setup(strategy, wrap="leaves", arguments=arguments, mixed_precision=precision)
    options = {"writeback": True}

    def probe(library: Library) -> list[Outcome]:
        return probed(rank_pool, library, summon_cases.computes, setup, tree=SIMPLE, options=options)

    deviation.judge(
        probe,
        torch_does=lambda seen: raised(seen, RuntimeError, "dtype"),
        we_do=lambda seen: all(
            outcome.raised is None and outcome.value["output"].dtype is torch.bfloat16 for outcome in seen
        ),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.backward_beside_whole_gradients")
@pytest.mark.deviation("fsdp.backward_beside_whole_gradients")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("setup", leaf_by_leaf[:2], ids=STRATEGIES[:2])
def test_a_backward_beside_whole_gradients(
    deviation: DeviationJudge, rank_pool: RankPool, setup: Setup
) -> None:
    def is_clear(seen: list[Outcome]) -> bool:
        text = "inside summon_full_params(with_grads=True), where `.grad` holds unsharded gradients"
        return all(text in str(outcome.value) for outcome in seen)

    deviation.judge(
        lambda library: probed(
            rank_pool, library, summon_cases.backward_beside_gradients, setup, tree=SIMPLE
        ),
        torch_does=lambda seen: all("AttributeError: " in str(outcome.value) for outcome in seen),
        we_do=is_clear,
    )


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
@pytest.mark.world_sizes(fewest=2)
def test_offloads_what_it_gathers(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    use_orig_params: bool,
    rank0_only: bool,
) -> None:
    """Beside the warning that it costs memory, as without the option."""
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    options = {"writeback": False, "rank0_only": rank0_only}
    expected = probed(rank_pool, reference, summon_cases.whole, setup, options=options)
    actual = probed(rank_pool, subject, summon_cases.whole, setup, options=options | {"offload_to_cpu": True})
    for outcome in actual:
        assert any("may result in" in text for _, text in outcome.warned) is not rank0_only, outcome.warned
    assert_ranks_agree(expected, [_without_warnings(outcome) for outcome in actual])


def _without_warnings(outcome: Any) -> Any:
    return replace(outcome, warned=())
