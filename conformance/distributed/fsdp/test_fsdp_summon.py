"""summon_full_params: unsharded parameters inside, shards outside, and which changes are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.distributed.fsdp import summon_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.lab import SIMPLE, TREE
from conformance.distributed.fsdp.module_trees import call, out_of_form
from conformance.distributed.fsdp.rank_judging import assert_ranks_agree, share_of_examples
from conformance.distributed.fsdp.twins import (
    FLAT,
    STRATEGIES,
    RankOutcomes,
    Twins,
    Wrapping,
    both_kinds,
    each,
    each_strategy,
    each_wrapping,
    leaf_by_leaf,
    raises,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import ONE_STEP, TRAINED

options = st.fixed_dictionaries(
    {},
    optional={name: st.booleans() for name in ("recurse", "writeback", "rank0_only", "with_grads")},
)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.options")
@each_strategy
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
    twins: Twins, strategy: str, options: Mapping[str, bool], use_orig_params: bool, at: int, adds: float
) -> None:
    setup = leaf_by_leaf(strategy, use_orig_params)
    twins.agree(summon_cases.summon, setup, may_raise=True, options=options, at=at, adds=adds)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.whole")
@each_strategy
def test_parameters_are_whole_and_named_as_before_wrapping(twins: Twins, strategy: str) -> None:
    plain = {name: parameter.detach() for name, parameter in TREE.build().named_parameters()}
    setup, options = leaf_by_leaf(strategy, use_orig_params=True), {"with_grads": True}
    for whole in twins.values(summon_cases.unsharded, setup, options=options):
        assert list(whole) == list(plain)
        for name, state in whole.items():
            assert torch.equal(state["value"].values, plain[name]), name
            assert state["grad"].values.shape == plain[name].shape


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.writeback")
@each_wrapping
def test_changes_inside_summon_are_trained_on(twins: Twins, wrapping: Wrapping) -> None:
    twins.agree(summon_cases.trains_on, leaf_by_leaf(**wrapping))


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.refused")
@pytest.mark.parametrize(
    "asks",
    [summon_cases.summon_in_summon, summon_cases.summon_in_forward, summon_cases.summon_in_backward],
    ids=lambda asks: asks.__name__,
)
def test_summon_is_refused_while_parameters_are_in_use(twins: Twins, asks: Any) -> None:
    assert "AssertionError" in str(twins.agree(asks, FLAT)[0].value)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.refused")
@each_wrapping
def test_backward_of_earlier_forward_inside_summon_is_refused(twins: Twins, wrapping: Wrapping) -> None:
    setup = replace(leaf_by_leaf(**wrapping), wrap="root")
    assert "ValueError" in str(twins.agree(summon_cases.backward_in_summon, setup)[0].value)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.computes")
@pytest.mark.parametrize(
    ("by", "backward"), [("unit", ""), ("unit", "inside"), ("unit", "after"), ("module", "")]
)
@pytest.mark.parametrize("recurse", [True, False])
@each_strategy
def test_forward_inside_summon_matches_torch(
    twins: Twins, strategy: str, recurse: bool, by: str, backward: str
) -> None:
    """The module inside the outermost unit runs no backward, because its own parameters would not be averaged."""
    arguments = {
        "options": {"recurse": recurse, "writeback": False},
        "by": by,
        "backward": backward,
        "tree": SIMPLE,
    }
    setup = leaf_by_leaf(strategy, use_orig_params=True)
    expected, actual = twins.of_both(summon_cases.computes, setup, **arguments)
    assert_ranks_agree(_without_shapes(expected), _without_shapes(actual), ONE_STEP)
    values_of(actual)


def _without_shapes(outcomes: RankOutcomes) -> RankOutcomes:
    """Drop the shapes of parameters after a forward inside, because torch's units are resharded by then."""
    return [
        outcome if outcome.raised else replace(outcome, value=outcome.value | {"inside": None})
        for outcome in outcomes
    ]


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.computes")
@pytest.mark.parametrize("writeback", [True, False])
@both_kinds
def test_forward_of_inner_units_inside_summon_matches_torch(
    twins: Twins, use_orig_params: bool, writeback: bool
) -> None:
    """Only the outermost unit is summoned, as for a model that generates."""
    options = {"recurse": False, "writeback": writeback}
    arguments = {"options": options, "by": "module", "adds": 0.5 if writeback else 0.0, "tree": SIMPLE}
    twins.agree(summon_cases.computes, leaf_by_leaf(use_orig_params=use_orig_params), **arguments)


@clause("distributed.fsdp.fsdp_torch_limit_removed.computes_while_summoned")
@pytest.mark.deviation("fsdp.computes_while_summoned")
@pytest.mark.parametrize("backward", ["", "inside", "after"])
@pytest.mark.parametrize("writeback", [True, False])
@each_wrapping
def test_forward_inside_summon_leaves_parameters_unsharded(
    twins: Twins, wrapping: Wrapping, writeback: bool, backward: str
) -> None:
    adds, model = 0.5 if writeback else 0.0, SIMPLE.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(adds)
    plain = dict(model.named_parameters())

    def is_right(outcomes: RankOutcomes) -> bool:
        return all(
            outcome.raised is None
            and outcome.value["inside"] == [parameter.shape for parameter in plain.values()]
            and all(
                torch.equal(outcome.value["whole"][name].values, parameter)
                for name, parameter in plain.items()
            )
            and _is_close(call(model, SIMPLE, SIMPLE.batch(0, rank)), outcome.value["output"].values)
            for rank, outcome in enumerate(outcomes)
        )

    twins.deviate(
        summon_cases.computes,
        leaf_by_leaf(**wrapping),
        tree=SIMPLE,
        options={"writeback": writeback},
        backward=backward,
        adds=adds,
        we_do=is_right,
        may_agree=not writeback or wrapping["strategy"] == "NO_SHARD" or twins.is_alone,
    )


def _is_close(expected: Any, actual: torch.Tensor) -> bool:
    return ONE_STEP.excess(out_of_form(expected).detach(), actual) is None


@clause("distributed.fsdp.fsdp_torch_limit_removed.computes_while_summoned")
@pytest.mark.deviation("fsdp.computes_while_summoned")
@each_wrapping
def test_forward_inside_summon_uses_mixed_precision(twins: Twins, wrapping: Wrapping) -> None:
    twins.deviate(
        summon_cases.computes,
        leaf_by_leaf(**wrapping, mixed_precision={"param_dtype": torch.bfloat16}),
        tree=SIMPLE,
        options={"writeback": True},
        torch_does=raises(RuntimeError, "dtype"),
        we_do=each(lambda value: value["output"].dtype is torch.bfloat16),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.backward_beside_whole_gradients")
@pytest.mark.deviation("fsdp.backward_beside_whole_gradients")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_backward_beside_unsharded_gradients_is_refused(twins: Twins, strategy: str) -> None:
    text = "inside summon_full_params(with_grads=True), where `.grad` holds unsharded gradients"
    twins.deviate(
        summon_cases.backward_beside_gradients,
        leaf_by_leaf(strategy, use_orig_params=True),
        tree=SIMPLE,
        torch_does=each(lambda value: "AttributeError: " in str(value)),
        we_do=each(lambda value: text in str(value)),
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.restores")
@pytest.mark.parametrize(
    "asks",
    [summon_cases.restores_after_an_error, summon_cases.of_plain_modules],
    ids=lambda asks: asks.__name__,
)
@each_strategy
def test_leaves_shards_behind(twins: Twins, strategy: str, asks: Any) -> None:
    twins.agree(asks, leaf_by_leaf(strategy, use_orig_params=True))


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.offload_to_cpu")
@pytest.mark.reference_limit("fsdp.summon_offloaded_to_cpu")
def test_torch_cannot_offload_on_a_cpu(torch_cannot: Callable[..., None]) -> None:
    """torch's ranks fail when they free the gathered parameters."""
    options = {"offload_to_cpu": True, "writeback": False}
    torch_cannot(summon_cases.unsharded, Setup(), options=options)


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.offload_to_cpu")
@pytest.mark.parametrize("rank0_only", [False, True])
@both_kinds
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@pytest.mark.world_sizes(fewest=2)
def test_offloads_what_it_gathers(
    twins: Twins, strategy: str, use_orig_params: bool, rank0_only: bool
) -> None:
    """Compare the parameters, and expect a warning about memory.

    On the CPU, torch cannot offload, so it runs without the option there.
    """
    setup = leaf_by_leaf(strategy, use_orig_params)
    options = {"writeback": False, "rank0_only": rank0_only}
    offloading = options | {"offload_to_cpu": True}
    asked_of_torch = options if twins.pool.device == "cpu" else offloading
    expected = twins.of(twins.reference, summon_cases.unsharded, setup, options=asked_of_torch)
    actual = twins.of_subject(summon_cases.unsharded, setup, options=offloading)
    for outcome in actual:
        assert any("may result in" in text for _, text in outcome.warned) is not rank0_only, outcome.warned
    assert_ranks_agree(
        *([replace(outcome, warned=()) for outcome in ranks] for ranks in (expected, actual)), TRAINED
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.offloaded_and_changed")
@pytest.mark.deviation("fsdp.offloaded_and_changed")
@each_wrapping
def test_summoned_values_precede_later_host_writes(twins: Twins, wrapping: Wrapping) -> None:
    setup = replace(leaf_by_leaf(**wrapping), offload_params=True)
    plain = dict(TREE.build().named_parameters())

    def is_right(parameters: dict[str, Any]) -> bool:
        return all(torch.equal(parameters[name].values, parameter) for name, parameter in plain.items())

    twins.deviate(
        summon_cases.changed_behind,
        setup,
        torch_does=lambda outcomes: not each(is_right)(outcomes),
        we_do=each(is_right),
        may_agree=True,  # unless the copy ends after the host writes
    )
