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


def failing(seen: RankOutcomes | RankFault) -> bool:
    """Return whether the ranks failed as a group."""
    return isinstance(seen, RankFault)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.tensors_of_their_own")
@pytest.mark.deviation("optim_state.tensors_of_their_own")
@pytest.mark.parametrize("kind", ["adam", *(pytest.param(one, marks=FULL) for one in ("amsgrad", "rmsprop"))])
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
def test_what_was_given_is_not_trained_on(cpu_twins: Twins) -> None:
    sides = {"torch_does": each(lambda stays: not stays), "we_do": each(bool)}
    cpu_twins.deviate(cases.given_stays, leaf_by_leaf("NO_SHARD", use_orig_params=True), **sides)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.first_without_state")
@pytest.mark.deviation("optim_state.first_without_state")
def test_a_flat_parameter_may_have_no_state_for_its_first(cpu_twins: Twins) -> None:
    we_do = each(lambda found: found == NAMES)
    cpu_twins.deviate(cases.loaded_without_the_first, FLAT, we_do=we_do)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.misshaped")
@pytest.mark.deviation("optim_state.misshaped")
@several_ranks
def test_a_tensor_of_another_shape_is_refused(cpu_twins: Twins) -> None:
    text = "ValueError: Tensor optimizer state does not have same shape as its parameter"
    cpu_twins.deviate(
        cases.misshaped,
        ORIGINALS,
        torch_does=each(lambda found: found is True),
        we_do=each(lambda found: str(found).startswith(text)),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.groups_of_two_kinds")
@pytest.mark.deviation("optim_state.groups_of_two_kinds")
def test_parameters_of_a_unit_may_have_states_of_two_kinds(cpu_twins: Twins) -> None:
    fewest = ["exp_avg", "exp_avg_sq", "step"]
    most = sorted([*fewest, "max_exp_avg_sq"])

    def are_right(found: Any) -> bool:
        if isinstance(found, str):
            return False
        return found == dict.fromkeys(found, most) | {"body.parts.0.inner.weight": fewest}

    cpu_twins.deviate(
        cases.groups_of_two_kinds,
        ORIGINALS,
        torch_does=lambda seen: (
            # On three ranks, the ranks without such parameters continue.
            failing(seen) or each(lambda found: str(found).startswith("AssertionError: Manually"))(seen)
        ),
        we_do=each(are_right),
        may_agree=cpu_twins.is_alone,
        may_fault=True,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.another_shape")
@pytest.mark.deviation("optim_state.another_shape")
@flat_or_originals
@several_ranks
def test_a_state_in_another_shape_is_refused_on_all_ranks(cpu_twins: Twins, setup: Setup) -> None:
    def is_named(found: Any) -> bool:
        return str(found).startswith("ValueError: rank 1: 'extra' of ") and "(3,)" in str(found)

    cpu_twins.deviate(cases.of_another_shape, setup, we_do=each(is_named), may_fault=True)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.another_shape")
@pytest.mark.deviation("optim_state.another_shape")
@flat_or_originals
@several_ranks
def test_tensors_in_a_list_are_refused(cpu_twins: Twins, setup: Setup) -> None:
    """A list does not say which of its tensors are sharded, so a rank's shards would be taken for full tensors."""

    def is_refused(found: Any) -> bool:
        return all(
            one.startswith("ValueError: ") and "'history' of " in one for one in map(str, found.values())
        )

    cpu_twins.deviate(cases.in_a_list, setup, we_do=each(is_refused), may_fault=True)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
@flat_or_originals
@several_ranks
def test_lists_of_numbers_are_saved_and_loaded_apart(cpu_twins: Twins, setup: Setup) -> None:
    def are_apart(found: Any) -> bool:
        if isinstance(found, str):
            return False
        saved, loaded = found
        return all(one == [0.5, 0.25] for one in saved) and all(one == [0.5, 1.25, 1.0] for one in loaded)

    cpu_twins.deviate(cases.numbers_in_a_list, setup, we_do=each(are_apart), may_fault=True)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.memory_order")
@pytest.mark.deviation("optim_state.memory_order")
@flat_or_originals
def test_a_transposed_parameter_gets_its_state_back(cpu_twins: Twins, setup: Setup) -> None:
    cpu_twins.deviate(cases.transposed, setup, we_do=each(all), may_agree=cpu_twins.is_alone)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.dtensor_without_mesh")
@pytest.mark.deviation("optim_state.dtensor_without_mesh")
@several_ranks
def test_dtensors_of_a_process_group(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.there_and_back_as_dtensors,
        Setup(wrap="leaves", ranks="group"),
        torch_does=lambda seen: all(one.raised and "_device_mesh" in one.raised.text for one in seen),
        we_do=each(lambda value: value == {"types": {"DTensor"}, "is_kept": True}),
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.groups_without_rank_zero")
@pytest.mark.deviation("optim_state.groups_without_rank_zero")
@FULL
def test_any_group_saves_and_loads(twins_of: TwinsOf) -> None:
    def are_right(seen: Any) -> bool:
        if failing(seen) or any(one.raised is not None for one in seen):
            return False
        values = [one.value for one in seen]
        saved, again = [value["saved"] for value in values], [value["again"] for value in values]
        return saved == again == [NAMES, [], NAMES, []] and all(all(value["is_kept"]) for value in values)

    twins_of(4).deviate(
        cases.in_a_group,
        of=2,
        torch_does=lambda seen: failing(seen) or "is not part of group" in str(seen),
        we_do=are_right,
        may_fault=True,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.one_rank_refuses")
@pytest.mark.deviation("optim_state.one_rank_refuses")
@flat_or_originals
@pytest.mark.parametrize(
    "what", ["misshaped", *(pytest.param(one, marks=FULL) for one in ("unknown", "another optimizer"))]
)
@several_ranks
def test_what_one_rank_cannot_load_no_rank_loads(cpu_twins: Twins, setup: Setup, what: str) -> None:
    def are_right(seen: Any) -> bool:
        first, second, *others = values_of(seen)
        reason = str(second["raised"]).partition(": ")[2]
        reported = [str(one["raised"]) for one in (first, *others)]
        is_named = all(
            one.startswith("RuntimeError: rank 1 cannot load") and reason in one for one in reported
        )
        return is_named and all(one["is_as_before"] for one in (first, second, *others))

    cpu_twins.deviate(
        cases.one_rank_refuses,
        setup,
        what=what,
        torch_does=lambda seen: not failing(seen) and any(not one["is_as_before"] for one in values_of(seen)),
        we_do=are_right,
        may_fault=True,
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.one_rank_refuses")
@pytest.mark.deviation("optim_state.one_rank_refuses")
@several_ranks
def test_parts_that_were_not_saved_together_are_refused(cpu_twins: Twins) -> None:
    def is_refused(one: Any) -> bool:
        is_named = "differ between ranks" in one["raised"] and "head.weight" in one["raised"]
        return is_named and one["is_as_before"]

    cpu_twins.deviate(
        cases.parts_that_differ, FLAT, torch_does=failing, we_do=each(is_refused), may_fault=True
    )


receives_all = each(lambda one: min(one["saving"], one["loading"]) >= one["whole"])


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.bytes_received")
@pytest.mark.deviation("optim_state.bytes_received")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_each_rank_receives_its_part_alone(cpu_twins: Twins, setup: Setup) -> None:
    def is_least(one: Any) -> bool:
        part = one["whole"] / cpu_twins.world_size + one["rows"]
        # Adam keeps two tensors for each parameter.
        return 0 < one["saving"] <= part and 0 < one["loading"] <= 2 * one["shard"]

    way = StateDictMethod("SHARDED")
    cpu_twins.deviate(cases.received, setup, way=way, torch_does=receives_all, we_do=each(is_least))


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.bytes_received")
@pytest.mark.deviation("optim_state.bytes_received")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_the_first_rank_alone_receives_what_it_alone_saves(cpu_twins: Twins, setup: Setup) -> None:
    def are_right(seen: Any) -> bool:
        first, *others = values_of(seen)
        # Padding to equal shards is received too.
        is_once = first["whole"] <= first["saving"] <= 1.5 * first["whole"]
        parts = [0 < one["loading"] <= 2 * (one["shard"] + one["rows"]) for one in others]
        return is_once and all(parts) and all(one["saving"] == 0 for one in others)

    way = StateDictMethod("FULL", rank0_only=True)
    cpu_twins.deviate(cases.received, setup, way=way, torch_does=receives_all, we_do=are_right)
