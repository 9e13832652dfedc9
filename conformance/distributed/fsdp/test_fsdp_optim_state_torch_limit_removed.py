"""Optimizer states that torch's methods lose or corrupt: deviations, asserted for both libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.optimizer_states import (
    FULL,
    FULL_ON_RANK_0,
    OLDER_FULL,
    Optimized,
    StateDictMethod,
    assert_close_states,
    copied,
    described,
    step,
    unwrapped,
)
from conformance.distributed.fsdp.scenes.rank_judging import holds
from conformance.distributed.fsdp.scenes.scene import TREE, Scene, tried
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    FULL_PROFILE,
    ORIGINALS,
    RankOutcomes,
    Twins,
    TwinsOf,
    each,
    flat_or_originals,
    leaf_by_leaf,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.ranks import RankFault

NAMES = sorted(name for name, _ in TREE.build().named_parameters())
several_ranks = pytest.mark.world_sizes(fewest=2)


def ranks_failed(outcomes: RankOutcomes | RankFault) -> bool:
    """Return whether the ranks failed as a group."""
    return isinstance(outcomes, RankFault)


def saved_states(scene: Scene, optimized: Optimized) -> Any:
    """Return the states that `full_optim_state_dict` saves on all ranks (`OLDER_FULL`)."""
    return described(OLDER_FULL.save(scene, optimized.stepped(scene.model)))["state"]


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.tensors_of_their_own")
@pytest.mark.deviation("optim_state.tensors_of_their_own")
@pytest.mark.parametrize(
    "kind", ["adam", *(pytest.param(name, marks=FULL_PROFILE) for name in ("amsgrad", "rmsprop"))]
)
def test_every_tensor_of_a_state_is_saved(cpu_twins: Twins, kind: str) -> None:
    """torch saves the values of the last tensor for every tensor of a state."""
    optimized = Optimized(kind)
    expected = unwrapped(optimized)["state"]
    we_do = each(lambda states: holds(assert_close_states, expected, states))
    cpu_twins.deviate(saved_states, ORIGINALS, optimized=optimized, we_do=we_do, may_agree=cpu_twins.is_alone)


def counts_after_a_step(scene: Scene) -> list[float]:
    """Return `step` of each parameter after a step, if all loaded states share one tensor for it."""
    saved = unwrapped(Optimized(steps=2))
    common = torch.tensor(2.0)
    for state in saved["state"].values():
        state["step"] = common
    optimizer = Optimized().optimizer(scene.model)
    optimizer.load_state_dict(OLDER_FULL.load(scene, optimizer, saved))
    step(scene.model, optimizer)
    return [float(state["step"]) for state in optimizer.state.values()]


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
def test_steps_are_counted_once(cpu_twins: Twins) -> None:
    """torch shares one `step` tensor, which an optimizer's step increments once for each parameter."""
    we_do = each(lambda steps: set(steps) == {3.0})
    cpu_twins.deviate(counts_after_a_step, ORIGINALS, we_do=we_do)


def separate_step_counts(scene: Scene) -> int:
    """Return the number of distinct addresses of the saved step counts."""
    saved = OLDER_FULL.save(scene, Optimized().stepped(scene.model))
    return len({state["step"].data_ptr() for state in saved["state"].values()})


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
def test_step_counts_are_saved_separately(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        separate_step_counts,
        FLAT,
        torch_does=each(lambda count: 0 < count < len(NAMES)),
        we_do=each(lambda count: count == len(NAMES)),
    )


def loaded_dict_is_unchanged(scene: Scene) -> bool:
    """Return whether a loaded state dict is unchanged after the optimizer has stepped."""
    saved = unwrapped(Optimized())
    before = copied(saved)
    optimizer = Optimized().optimizer(scene.model)
    optimizer.load_state_dict(OLDER_FULL.load(scene, optimizer, saved))
    step(scene.model, optimizer)
    return _are_equal(before, saved)


def _are_equal(first: Any, second: Any) -> bool:
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.given_stays")
@pytest.mark.deviation("optim_state.given_stays")
def test_loaded_state_dict_is_not_changed_by_training(cpu_twins: Twins) -> None:
    """torch loads the tensors of the state dict themselves, and training changes them."""
    sides = {"torch_does": each(lambda stays: not stays), "we_do": each(bool)}
    cpu_twins.deviate(loaded_dict_is_unchanged, leaf_by_leaf("NO_SHARD", use_orig_params=True), **sides)


def load_without_first_state(scene: Scene) -> Any:
    """Return the names that are saved after a load in which the first parameter of a unit had no state."""
    optimized = Optimized("momentum")
    state_dict = unwrapped(optimized)
    del state_dict["state"]["head.weight"]
    optimizer = optimized.optimizer(scene.model)
    optimizer.load_state_dict(OLDER_FULL.load(scene, optimizer, state_dict))
    return sorted(OLDER_FULL.save(scene, optimizer)["state"])


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.first_without_state")
@pytest.mark.deviation("optim_state.first_without_state")
def test_flat_parameter_loads_without_state_of_first_parameter(cpu_twins: Twins) -> None:
    """torch loads no state for the flat parameter, because its first parameter has none."""
    we_do = each(lambda names: names == NAMES)
    cpu_twins.deviate(load_without_first_state, FLAT, we_do=we_do)


def load_misshaped_state(scene: Scene) -> Any:
    optimized = Optimized("momentum")
    saved = unwrapped(optimized)
    saved["state"]["head.weight"]["momentum_buffer"] = torch.zeros(40)
    return tried(lambda: bool(OLDER_FULL.load(scene, optimized.optimizer(scene.model), saved)["state"]))


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.misshaped")
@pytest.mark.deviation("optim_state.misshaped")
@several_ranks
def test_state_tensor_of_another_shape_is_refused(cpu_twins: Twins) -> None:
    text = "ValueError: Tensor optimizer state does not have same shape as its parameter"
    cpu_twins.deviate(
        load_misshaped_state,
        ORIGINALS,
        torch_does=each(lambda result: result is True),
        we_do=each(lambda result: str(result).startswith(text)),
    )


def save_groups_of_two_kinds(scene: Scene) -> Any:
    """Save parameters of one unit in two groups, of which one keeps an additional tensor."""
    parameters = list(scene.model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "amsgrad": True}]
    optimizer = torch.optim.Adam(groups, lr=0.05)
    step(scene.model, optimizer)
    return tried(
        lambda: {name: sorted(state) for name, state in OLDER_FULL.save(scene, optimizer)["state"].items()}
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.groups_of_two_kinds")
@pytest.mark.deviation("optim_state.groups_of_two_kinds")
def test_parameters_of_a_unit_may_have_states_of_two_kinds(cpu_twins: Twins) -> None:
    fewest = ["exp_avg", "exp_avg_sq", "step"]
    most = sorted([*fewest, "max_exp_avg_sq"])
    expected = dict.fromkeys(NAMES, most) | {"body.parts.0.inner.weight": fewest}

    cpu_twins.deviate(
        save_groups_of_two_kinds,
        ORIGINALS,
        torch_does=lambda outcomes: (
            # On three ranks, the ranks without such parameters continue.
            ranks_failed(outcomes)
            or each(lambda result: str(result).startswith("AssertionError: Manually"))(outcomes)
        ),
        we_do=each(lambda tensors: tensors == expected),
        may_agree=cpu_twins.is_alone,
        may_fault=True,
    )


def save_state_of_another_shape(scene: Scene) -> Any:
    """Save an optimizer that keeps a tensor of another shape than its parameter, on the second rank only."""
    optimizer = Optimized("momentum").stepped(scene.model)
    if scene.rank.rank == 1:
        next(iter(optimizer.state.values()))["extra"] = torch.zeros(3)
    return tried(lambda: sorted(OLDER_FULL.save(scene, optimizer)))


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.another_shape")
@pytest.mark.deviation("optim_state.another_shape")
@flat_or_originals
@several_ranks
def test_state_of_another_shape_on_one_rank_is_refused_on_all(cpu_twins: Twins, setup: Setup) -> None:
    """torch's ranks gather buffers of unequal sizes, or raise AssertionError about empty ranks."""

    def is_named(result: Any) -> bool:
        return str(result).startswith("ValueError: rank 1: 'extra' of ") and "(3,)" in str(result)

    cpu_twins.deviate(save_state_of_another_shape, setup, we_do=each(is_named), may_fault=True)


def save_and_load_list_of_tensors(scene: Scene) -> Any:
    """Save and load a list of tensors for each parameter."""
    optimized = Optimized("momentum")
    optimizer, fresh = optimized.stepped(scene.model), optimized.optimizer(scene.model)
    state_dict = unwrapped(optimized)
    for parameter, state in optimizer.state.items():
        state["history"] = [torch.zeros_like(parameter)]
    for state in state_dict["state"].values():
        state["history"] = [state["momentum_buffer"].clone()]
    return {
        "saving": tried(lambda: sorted(OLDER_FULL.save(scene, optimizer))),
        "loading": tried(lambda: sorted(OLDER_FULL.load(scene, fresh, state_dict))),
    }


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.another_shape")
@pytest.mark.deviation("optim_state.another_shape")
@flat_or_originals
@several_ranks
def test_tensors_in_a_list_are_refused(cpu_twins: Twins, setup: Setup) -> None:
    """A list does not say which of its tensors are sharded, so a rank's shards would be taken for full tensors.

    torch saves the list with flat parameters, and loads a list with original parameters.
    """

    def is_refused(results: Any) -> bool:
        errors = [*map(str, results.values())]
        return all(error.startswith("ValueError: ") and "'history' of " in error for error in errors)

    cpu_twins.deviate(save_and_load_list_of_tensors, setup, we_do=each(is_refused), may_fault=True)


def save_and_load_list_of_numbers(scene: Scene) -> Any:
    """Return the lists in a saved and in a loaded state, after the optimizers changed their own lists."""
    optimized = Optimized("momentum")
    optimizer, fresh = optimized.stepped(scene.model), optimized.optimizer(scene.model)
    for state in optimizer.state.values():
        state["losses"] = [0.5, torch.tensor(0.25)]

    def saved_and_loaded() -> Any:
        saved = OLDER_FULL.save(scene, optimizer)
        fresh.load_state_dict(OLDER_FULL.load(scene, fresh, saved))
        for state in (*optimizer.state.values(), *fresh.state.values()):
            state["losses"].append(1.0)
            state["losses"][1].add_(1)
        return [
            {tuple(map(float, state["losses"])) for state in states}
            for states in (saved["state"].values(), fresh.state.values())
        ]

    return tried(saved_and_loaded)


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.numbers_of_their_own")
@pytest.mark.deviation("optim_state.numbers_of_their_own")
@flat_or_originals
@several_ranks
def test_lists_of_numbers_are_saved_and_loaded_as_copies(cpu_twins: Twins, setup: Setup) -> None:
    """torch raises TypeError with flat parameters. Otherwise, the optimizer changes the saved tensor."""
    are_apart = each(lambda lists: lists == [{(0.5, 0.25)}, {(0.5, 1.25, 1.0)}])
    cpu_twins.deviate(save_and_load_list_of_numbers, setup, we_do=are_apart, may_fault=True)


def transposed_round_trip(scene: Scene, way: StateDictMethod, is_ignored: bool = False) -> list[bool]:
    """Return whether each state of a model with a transposed parameter is the same after it was saved and loaded."""
    weight = nn.Parameter(torch.arange(6.0, device=scene.rank.device).reshape(2, 3).t())
    module = nn.Module()
    module.register_parameter("weight", weight)
    if is_ignored:
        module.linear = nn.Linear(2, 2)
        scene.model = scene.wrap(module, use_orig_params=True, ignored_states=[weight])
    else:
        scene.model = scene.wrapped(module)
    optimizer = Optimized("momentum").stepped(scene.model)
    loaded = way.load(scene, optimizer, way.save(scene, optimizer))
    states = optimizer.state_dict()["state"]
    return [
        torch.equal(states[key]["momentum_buffer"], loaded["state"][key]["momentum_buffer"]) for key in states
    ]


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.memory_order")
@pytest.mark.deviation("optim_state.memory_order")
@flat_or_originals
def test_state_of_transposed_parameter_round_trips(cpu_twins: Twins, setup: Setup) -> None:
    """torch loads permuted values for the state of a transposed parameter."""
    is_same = each(lambda are_same: are_same == [True])
    cpu_twins.deviate(
        transposed_round_trip, setup, we_do=is_same, may_agree=cpu_twins.is_alone, way=OLDER_FULL
    )


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.memory_order")
@pytest.mark.deviation("optim_state.memory_order")
@pytest.mark.parametrize("is_ignored", [False, True], ids=["unsharded", "ignored"])
@several_ranks
def test_replicated_state_of_transposed_parameter_loads_from_rank_0(
    cpu_twins: Twins, is_ignored: bool
) -> None:
    cpu_twins.deviate(
        transposed_round_trip,
        leaf_by_leaf("NO_SHARD", use_orig_params=True),
        torch_does=lambda outcomes: [all(value) for value in values_of(outcomes[:2])] == [True, False],
        we_do=each(all),
        way=FULL_ON_RANK_0,
        is_ignored=is_ignored,
    )


def round_trip_as_dtensors(scene: Scene) -> dict[str, Any]:
    """Return the types of states that are saved as DTensors, and whether a fresh optimizer loads the same states."""
    fsdp, optimized = scene.api, Optimized("momentum")
    optimizer, fresh = optimized.stepped(scene.model), optimized.optimizer(scene.model)
    before = copied(optimizer.state_dict())
    with scene.fsdp.state_dict_type(
        scene.model,
        fsdp.StateDictType.SHARDED_STATE_DICT,
        fsdp.ShardedStateDictConfig(_use_dtensor=True),
        fsdp.ShardedOptimStateDictConfig(_use_dtensor=True),
    ):
        saved = scene.fsdp.optim_state_dict(scene.model, optimizer)
        types = {type(state["momentum_buffer"]).__name__ for state in saved["state"].values()}
        fresh.load_state_dict(scene.fsdp.optim_state_dict_to_load(scene.model, fresh, saved))
    return {"types": types, "is_kept": _are_equal(before["state"], fresh.state_dict()["state"])}


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.dtensor_without_mesh")
@pytest.mark.deviation("fsdp.dtensor_without_mesh")
@several_ranks
def test_dtensor_states_of_process_group_round_trip(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        round_trip_as_dtensors,
        Setup(wrap="leaves", ranks="group"),
        torch_does=lambda outcomes: all(
            outcome.raised and "_device_mesh" in outcome.raised.text for outcome in outcomes
        ),
        we_do=each(lambda value: value == {"types": {"DTensor"}, "is_kept": True}),
    )


def save_and_load_in_groups(scene: Scene, of: int) -> Any:
    """Save and load in groups of `of` ranks that each have a model."""
    ranks = [list(range(first, first + of)) for first in range(0, scene.rank.world_size, of)]
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    model = scene.model = scene.wrap(scene.plain, process_group=group, use_orig_params=True)
    optimizer = Optimized("momentum").stepped(model)
    saved = scene.fsdp.full_optim_state_dict(model, optimizer, group=group)
    states = optimizer.state_dict()["state"]
    scattered = scene.fsdp.scatter_full_optim_state_dict(saved, model, optim=optimizer, group=group)["state"]
    with FULL_ON_RANK_0.set_on(scene):
        again = scene.fsdp.optim_state_dict(model, optimizer, group=group)
        loaded = scene.fsdp.optim_state_dict_to_load(model, optimizer, again, group=group)["state"]
    return {
        "saved": sorted(saved.get("state", ())),
        "again": sorted(again.get("state", ())),
        "is_kept": [
            _are_equal(states[key], scattered[key]) and _are_equal(states[key], loaded[key]) for key in states
        ],
    }


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.groups_without_rank_zero")
@pytest.mark.deviation("optim_state.groups_without_rank_zero")
@FULL_PROFILE
def test_any_group_saves_and_loads(twins_of: TwinsOf) -> None:
    def are_right(outcomes: Any) -> bool:
        if ranks_failed(outcomes) or any(outcome.raised is not None for outcome in outcomes):
            return False
        values = [outcome.value for outcome in outcomes]
        saved, again = [value["saved"] for value in values], [value["again"] for value in values]
        return saved == again == [NAMES, [], NAMES, []] and all(all(value["is_kept"]) for value in values)

    twins_of(4).deviate(
        save_and_load_in_groups,
        of=2,
        torch_does=lambda outcomes: ranks_failed(outcomes) or "is not part of group" in str(outcomes),
        we_do=are_right,
        may_fault=True,
    )


def load_misfit_on_second_rank(scene: Scene, fault: str) -> Any:
    """Load a state that does not fit on the second rank."""
    state_dict = copied(FULL.save(scene, Optimized(steps=2).stepped(scene.model)))
    optimizer = Optimized(steps=1).stepped(scene.model)
    if scene.rank.rank == 1:
        if fault == "misshaped":
            state_dict["state"]["head.weight"]["exp_avg"] = torch.zeros(3, 3)
        elif fault == "unknown":
            state_dict["param_groups"][0]["params"].append("unknown")
        else:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    return _refused(scene, optimizer, lambda: FULL.load(scene, optimizer, state_dict, load_directly=True))


def _refused(scene: Scene, optimizer: torch.optim.Optimizer, load: Callable[[], Any]) -> dict[str, Any]:
    before = copied([optimizer.state_dict(), list(scene.model.parameters())])
    raised = tried(lambda: load() and None)
    after = [optimizer.state_dict(), list(scene.model.parameters())]
    return {"raised": raised, "is_as_before": _are_equal(before, after)}


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.one_rank_refuses")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
@flat_or_originals
@pytest.mark.parametrize(
    "fault",
    ["misshaped", *(pytest.param(fault, marks=FULL_PROFILE) for fault in ("unknown", "another optimizer"))],
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
        return bool(reason) and is_named and all(value["is_as_before"] for value in (first, second, *others))

    cpu_twins.deviate(
        load_misfit_on_second_rank,
        setup,
        fault=fault,
        torch_does=lambda outcomes: (
            not ranks_failed(outcomes) and any(not value["is_as_before"] for value in values_of(outcomes))
        ),
        we_do=are_right,
        may_fault=True,
    )


def load_shards_of_some_ranks(scene: Scene) -> Any:
    """Load sharded rows of a state that the second rank does not have."""
    optimizer, way = Optimized("momentum").stepped(scene.model), StateDictMethod("SHARDED")
    state_dict = way.save(scene, optimizer)
    if scene.rank.rank == 1:
        del state_dict["state"]["head.weight"]
    return _refused(scene, optimizer, lambda: way.load(scene, optimizer, state_dict, load_directly=True))


@clause("distributed.fsdp.fsdp_optim_state_torch_limit_removed.one_rank_refuses")
@pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")
@several_ranks
def test_shards_not_saved_together_are_refused(cpu_twins: Twins) -> None:
    def is_refused(value: Any) -> bool:
        is_named = "differ between ranks" in value["raised"] and "head.weight" in value["raised"]
        return is_named and value["is_as_before"]

    cpu_twins.deviate(
        load_shards_of_some_ranks, FLAT, torch_does=ranks_failed, we_do=each(is_refused), may_fault=True
    )
