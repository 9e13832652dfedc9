"""Optimizer states that torch's methods lose or corrupt: deviations, asserted for both libraries."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.distributed.fsdp import optim_state_torch_limit_removed_cases as cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.lab import TREE
from conformance.distributed.fsdp.optim_state_cases import Optimized, StateDictMethod
from conformance.distributed.fsdp.optim_state_judging import assert_close_states, unwrapped
from conformance.distributed.fsdp.twins import (
    FLAT,
    FULL,
    ORIGINALS,
    RankOutcomes,
    Twins,
    TwinsOf,
    each,
    flat_or_originals,
    holds,
    leaf_by_leaf,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.ranks import RankFault

NAMES = sorted(name for name, _ in TREE.build().named_parameters())
several_ranks = pytest.mark.world_sizes(fewest=2)


def failing(outcomes: RankOutcomes | RankFault) -> bool:
    """Return whether the ranks failed as a group."""
    return isinstance(outcomes, RankFault)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.tensors_of_their_own")
@pytest.mark.deviation("optim_state.tensors_of_their_own")
@pytest.mark.parametrize(
    "kind", ["adam", *(pytest.param(name, marks=FULL) for name in ("amsgrad", "rmsprop"))]
)
def test_every_tensor_of_a_state_is_saved(cpu_twins: Twins, kind: str) -> None:
    optimized = Optimized(kind)
    expected = unwrapped(optimized)["state"]
    we_do = each(lambda states: holds(assert_close_states, expected, states))
    cpu_twins.deviate(cases.saved, ORIGINALS, optimized=optimized, we_do=we_do, may_agree=cpu_twins.is_alone)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
def test_steps_are_counted_once(cpu_twins: Twins) -> None:
    we_do = each(lambda steps: set(steps) == {3.0})
    cpu_twins.deviate(cases.counts_after_a_step, ORIGINALS, we_do=we_do)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
def test_numbers_are_saved_apart(cpu_twins: Twins) -> None:
    sides = {"torch_does": each(lambda are: not are), "we_do": each(bool)}
    cpu_twins.deviate(cases.saved_numbers_are_separate, FLAT, **sides)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.given_stays")
@pytest.mark.deviation("optim_state.given_stays")
def test_loaded_state_dict_is_not_changed_by_training(cpu_twins: Twins) -> None:
    sides = {"torch_does": each(lambda stays: not stays), "we_do": each(bool)}
    cpu_twins.deviate(cases.given_stays, leaf_by_leaf("NO_SHARD", use_orig_params=True), **sides)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.first_without_state")
@pytest.mark.deviation("optim_state.first_without_state")
def test_flat_parameter_loads_without_state_of_first_parameter(cpu_twins: Twins) -> None:
    we_do = each(lambda names: names == NAMES)
    cpu_twins.deviate(cases.loaded_without_the_first, FLAT, we_do=we_do)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.misshaped")
@pytest.mark.deviation("optim_state.misshaped")
@several_ranks
def test_state_tensor_of_another_shape_is_refused(cpu_twins: Twins) -> None:
    text = "ValueError: Tensor optimizer state does not have same shape as its parameter"
    cpu_twins.deviate(
        cases.misshaped,
        ORIGINALS,
        torch_does=each(lambda result: result is True),
        we_do=each(lambda result: str(result).startswith(text)),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.groups_of_two_kinds")
@pytest.mark.deviation("optim_state.groups_of_two_kinds")
def test_parameters_of_a_unit_may_have_states_of_two_kinds(cpu_twins: Twins) -> None:
    fewest = ["exp_avg", "exp_avg_sq", "step"]
    most = sorted([*fewest, "max_exp_avg_sq"])

    def are_right(tensors: Any) -> bool:
        if isinstance(tensors, str):
            return False
        return tensors == dict.fromkeys(tensors, most) | {"body.parts.0.inner.weight": fewest}

    cpu_twins.deviate(
        cases.groups_of_two_kinds,
        ORIGINALS,
        torch_does=lambda outcomes: (
            # On three ranks, the ranks without such parameters continue.
            failing(outcomes)
            or each(lambda result: str(result).startswith("AssertionError: Manually"))(outcomes)
        ),
        we_do=each(are_right),
        may_agree=cpu_twins.is_alone,
        may_fault=True,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.another_shape")
@pytest.mark.deviation("optim_state.another_shape")
@flat_or_originals
@several_ranks
def test_state_of_another_shape_on_one_rank_is_refused_on_all(cpu_twins: Twins, setup: Setup) -> None:
    def is_named(result: Any) -> bool:
        return str(result).startswith("ValueError: rank 1: 'extra' of ") and "(3,)" in str(result)

    cpu_twins.deviate(cases.of_another_shape, setup, we_do=each(is_named), may_fault=True)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.another_shape")
@pytest.mark.deviation("optim_state.another_shape")
@flat_or_originals
@several_ranks
def test_tensors_in_a_list_are_refused(cpu_twins: Twins, setup: Setup) -> None:
    """A list does not say which of its tensors are sharded, so a rank's shards would be taken for full tensors."""

    def is_refused(results: Any) -> bool:
        return all(
            error.startswith("ValueError: ") and "'history' of " in error
            for error in map(str, results.values())
        )

    cpu_twins.deviate(cases.in_a_list, setup, we_do=each(is_refused), may_fault=True)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
@flat_or_originals
@several_ranks
def test_lists_of_numbers_are_saved_and_loaded_apart(cpu_twins: Twins, setup: Setup) -> None:
    def are_apart(lists: Any) -> bool:
        if isinstance(lists, str):
            return False
        saved, loaded = lists
        return all(numbers == [0.5, 0.25] for numbers in saved) and all(
            numbers == [0.5, 1.25, 1.0] for numbers in loaded
        )

    cpu_twins.deviate(cases.numbers_in_a_list, setup, we_do=each(are_apart), may_fault=True)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.memory_order")
@pytest.mark.deviation("optim_state.memory_order")
@flat_or_originals
def test_state_of_transposed_parameter_round_trips(cpu_twins: Twins, setup: Setup) -> None:
    cpu_twins.deviate(cases.transposed, setup, we_do=each(all), may_agree=cpu_twins.is_alone)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.dtensor_without_mesh")
@pytest.mark.deviation("optim_state.dtensor_without_mesh")
@several_ranks
def test_dtensors_of_a_process_group(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.there_and_back_as_dtensors,
        Setup(wrap="leaves", ranks="group"),
        torch_does=lambda outcomes: all(
            outcome.raised and "_device_mesh" in outcome.raised.text for outcome in outcomes
        ),
        we_do=each(lambda value: value == {"types": {"DTensor"}, "is_kept": True}),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.groups_without_rank_zero")
@pytest.mark.deviation("optim_state.groups_without_rank_zero")
@FULL
def test_any_group_saves_and_loads(twins_of: TwinsOf) -> None:
    def are_right(outcomes: Any) -> bool:
        if failing(outcomes) or any(outcome.raised is not None for outcome in outcomes):
            return False
        values = [outcome.value for outcome in outcomes]
        saved, again = [value["saved"] for value in values], [value["again"] for value in values]
        return saved == again == [NAMES, [], NAMES, []] and all(all(value["is_kept"]) for value in values)

    twins_of(4).deviate(
        cases.in_a_group,
        of=2,
        torch_does=lambda outcomes: failing(outcomes) or "is not part of group" in str(outcomes),
        we_do=are_right,
        may_fault=True,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.one_rank_refuses")
@pytest.mark.deviation("optim_state.one_rank_refuses")
@flat_or_originals
@pytest.mark.parametrize(
    "fault", ["misshaped", *(pytest.param(fault, marks=FULL) for fault in ("unknown", "another optimizer"))]
)
@several_ranks
def test_load_failure_on_one_rank_loads_nothing(cpu_twins: Twins, setup: Setup, fault: str) -> None:
    def are_right(outcomes: Any) -> bool:
        first, second, *others = values_of(outcomes)
        reason = str(second["raised"]).partition(": ")[2]
        reported = [str(value["raised"]) for value in (first, *others)]
        is_named = all(
            error.startswith("RuntimeError: rank 1 cannot load") and reason in error for error in reported
        )
        return is_named and all(value["is_as_before"] for value in (first, second, *others))

    cpu_twins.deviate(
        cases.one_rank_refuses,
        setup,
        fault=fault,
        torch_does=lambda outcomes: (
            not failing(outcomes) and any(not value["is_as_before"] for value in values_of(outcomes))
        ),
        we_do=are_right,
        may_fault=True,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.one_rank_refuses")
@pytest.mark.deviation("optim_state.one_rank_refuses")
@several_ranks
def test_parts_that_were_not_saved_together_are_refused(cpu_twins: Twins) -> None:
    def is_refused(value: Any) -> bool:
        is_named = "differ between ranks" in value["raised"] and "head.weight" in value["raised"]
        return is_named and value["is_as_before"]

    cpu_twins.deviate(
        cases.parts_that_differ, FLAT, torch_does=failing, we_do=each(is_refused), may_fault=True
    )


receives_all = each(lambda value: min(value["saving"], value["loading"]) >= value["whole"])


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.bytes_received")
@pytest.mark.deviation("optim_state.bytes_received")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_each_rank_receives_its_part_alone(cpu_twins: Twins, setup: Setup) -> None:
    def is_least(value: Any) -> bool:
        part = value["whole"] / cpu_twins.world_size + value["rows"]
        # Adam keeps two tensors for each parameter.
        return 0 < value["saving"] <= part and 0 < value["loading"] <= 2 * value["shard"]

    way = StateDictMethod("SHARDED")
    cpu_twins.deviate(cases.received, setup, way=way, torch_does=receives_all, we_do=each(is_least))


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.bytes_received")
@pytest.mark.deviation("optim_state.bytes_received")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_rank0_only_saving_sends_states_to_first_rank_only(cpu_twins: Twins, setup: Setup) -> None:
    def are_right(outcomes: Any) -> bool:
        first, *others = values_of(outcomes)
        # Padding to equal shards is received too.
        is_once = first["whole"] <= first["saving"] <= 1.5 * first["whole"]
        parts = [0 < value["loading"] <= 2 * (value["shard"] + value["rows"]) for value in others]
        return is_once and all(parts) and all(value["saving"] == 0 for value in others)

    way = StateDictMethod("FULL", rank0_only=True)
    cpu_twins.deviate(cases.received, setup, way=way, torch_does=receives_all, we_do=are_right)
