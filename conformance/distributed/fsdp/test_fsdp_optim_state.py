"""Optimizer state dicts of sharded models, compared with torch's ranks and with one unsharded process."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map_only

from conformance.distributed.fsdp.scenes import optimizer_states
from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.optimizer_states import (
    FULL,
    FULL_ON_RANK_0,
    OLDER_FULL,
    OPTIMIZERS,
    Optimized,
    StateDictMethod,
    as_tensors,
    assert_close_states,
    copied,
    described,
    on_host,
    step,
    unwrapped,
)
from conformance.distributed.fsdp.scenes.rank_judging import assert_ranks_agree, share_of_examples
from conformance.distributed.fsdp.scenes.scene import SIMPLE, Scene, survivors
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    FULL_PROFILE,
    STRATEGIES,
    Twins,
    TwinsOf,
    flat_or_originals,
    raises,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.library import load_library
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.judge.tolerances import EXACT
from conformance.strategies.modules import module_trees
from conformance.strategies.sharding import setups

# Optimizers whose states torch saves correctly with use_orig_params: deviation optim_state.tensors_of_their_own.
_OF_ONE_TENSOR = ("sgd", "momentum", "adagrad", "adafactor")
# Optimizers that step each element independently, so the boundaries of shards do not matter.
_OF_ELEMENTS = tuple(kind for kind in OPTIMIZERS if kind != "adafactor")
# Optimizers whose state stays zero if parameters and gradients are zero, as in the padding of flat parameters.
_OF_ZEROS = tuple(kind for kind in _OF_ELEMENTS if kind != "rprop")
_SCATTERED, _OLDER_SHARDED = StateDictMethod("scattered"), StateDictMethod("sharded")
_TYPES = (
    FULL,
    FULL_ON_RANK_0,
    StateDictMethod("SHARDED"),
    StateDictMethod("SHARDED", offloads=False),
    StateDictMethod("LOCAL"),
)


def optimizers(kinds: Sequence[str] = tuple(OPTIMIZERS)) -> st.SearchStrategy[Optimized]:
    return st.builds(
        Optimized, kind=st.sampled_from(kinds), groups=st.sampled_from([1, 2]), steps=st.integers(0, 2)
    )


@st.composite
def setups_of_all(draw: st.DrawFn, ranks: tuple[str, ...] = ("default", "group", "mesh")) -> Setup:
    ignored = draw(st.sampled_from(["", "", "ignored_modules", "parameters"]))
    wraps = ("root", "leaves", "size") if ignored else ("root", "leaves", "groups", "size", "manual")
    strategy = draw(st.sampled_from(STRATEGIES))
    return draw(setups(strategy=strategy, ranks=ranks, wraps=wraps, ignored=ignored))


def kinds_of(setup: Setup, way: StateDictMethod) -> tuple[str, ...]:
    """Return the optimizers whose states torch saves correctly with this setup and method."""
    overwrites = setup.uses_orig_params and way.offloads and way.name in ("full", "scattered", "FULL")
    return _OF_ONE_TENSOR if overwrites else tuple(OPTIMIZERS)


def each_method(*ways: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", ways, ids=lambda way: way.name)


@clause("distributed.fsdp.fsdp_optim_state.there_and_back")
@each_method(OLDER_FULL, _SCATTERED, _OLDER_SHARDED, *_TYPES)
@share_of_examples(0.06)
@given(data=st.data())
def test_states_round_trip_like_torch(twins: Twins, way: StateDictMethod, data: st.DataObject) -> None:
    setup = data.draw(setups_of_all())
    optimized = data.draw(optimizers(kinds_of(setup, way)))
    tree = data.draw(module_trees(dtype=torch.float32))
    arguments = {"tree": tree, "optimized": optimized, "way": way}
    twins.agree(optimizer_states.save_load_and_step, setup, EXACT, may_raise=True, **arguments)


@clause("distributed.fsdp.fsdp_optim_state.there_and_back")
@pytest.mark.parametrize(
    ("all_ranks", "ranks_are"),
    [
        (3, "default"),
        pytest.param(4, "groups", marks=FULL_PROFILE),
        pytest.param(4, "meshes", marks=FULL_PROFILE),
    ],
)
@share_of_examples(0.03)
@given(
    data=st.data(),
    way=st.sampled_from([_SCATTERED, _OLDER_SHARDED, *_TYPES]),
    kind=st.sampled_from(_OF_ONE_TENSOR),
)
def test_states_round_trip_on_more_ranks(
    twins_of: TwinsOf, all_ranks: int, ranks_are: str, data: st.DataObject, way: StateDictMethod, kind: str
) -> None:
    strategy = "FULL_SHARD" if ranks_are == "default" else "HYBRID_SHARD"
    setup = data.draw(setups(strategy=strategy, ranks=(ranks_are,), shards=2))
    arguments = {"optimized": Optimized(kind, 2), "way": way}
    twins_of(all_ranks).agree(optimizer_states.save_load_and_step, setup, EXACT, may_raise=True, **arguments)


@clause("distributed.fsdp.fsdp_optim_state.there_and_back")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
def test_states_round_trip_on_replicas(twins_of: TwinsOf, kind: str) -> None:
    """Rank 0 is not in the group of the second replica."""
    setup = Setup("HYBRID_SHARD", ranks="groups", shards=2, wrap="leaves")
    arguments = {"optimized": Optimized("momentum"), "way": StateDictMethod(kind, offloads=kind != "FULL")}
    twins_of(4).agree(optimizer_states.save_load_and_step, setup, EXACT, may_raise=True, **arguments)


def saved_beside_meta(scene: Scene, way: StateDictMethod) -> Any:
    """Return the devices of the saved tensors of a model with an ignored module on the meta device."""
    scene.plain.beside = nn.Linear(2, 2, device="meta")
    kind = {"use_orig_params": scene.setup.uses_orig_params}
    scene.model = scene.wrap(scene.plain, ignored_modules=[scene.plain.beside], **kind)
    saved = described(way.save(scene, Optimized("momentum").stepped(scene.model)))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.device.type, saved)


@clause("distributed.fsdp.fsdp_optim_state.there_and_back")
@each_method(OLDER_FULL, *_TYPES)
@flat_or_originals
def test_ignored_meta_parameter_is_saved_unless_states_are_offloaded(
    cpu_twins: Twins, setup: Setup, way: StateDictMethod
) -> None:
    """A tensor on the meta device cannot be offloaded."""
    first, *others = cpu_twins.agree(saved_beside_meta, setup, EXACT, may_raise=True, way=way)
    if way.offloads:
        assert raises(NotImplementedError, "meta tensor")([first, *others])
        return
    values_of([first, *others])
    assert first.value["state"]["beside.weight"] == {"momentum_buffer": "meta"}


@clause("distributed.fsdp.fsdp_optim_state.as_unwrapped")
@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=FULL_PROFILE) for world in (1, 2, 4))])
@share_of_examples(0.3)
@given(data=st.data(), way=st.sampled_from([OLDER_FULL, _SCATTERED, *_TYPES]))
def test_states_equal_those_of_unwrapped_model(
    twins_of: TwinsOf, world: int, data: st.DataObject, way: StateDictMethod
) -> None:
    setup = data.draw(setups_of_all(ranks=("default",)))
    frozen = ("none", "none", "first", "all") if setup.uses_orig_params else ("none",)
    tree = data.draw(module_trees(dtype=torch.float32, frozen=frozen))
    kinds = [kind for kind in kinds_of(setup, way) if kind in _OF_ZEROS]
    optimized = Optimized(data.draw(st.sampled_from(kinds)))
    expected = unwrapped(optimized, tree)["state"]
    arguments = {"tree": tree, "optimized": optimized, "way": way}
    for rank, value in enumerate(
        twins_of(world).values(optimizer_states.save_load_and_step, setup, **arguments)
    ):
        if rank == 0 or not (way.rank0_only or way == _SCATTERED):
            if way.name in ("full", "scattered", "FULL"):
                assert_close_states(expected, value["saved"]["state"])
            assert sorted(value["saved"]["state"]) == sorted(expected)
        assert_state_is_restored(value["before"]["state"], value["loaded"]["state"])


def assert_state_is_restored(expected: Mapping[Any, Any], actual: Mapping[Any, Any]) -> None:
    """Compare two states of a rank's own optimizer, before it was saved and after it was loaded.

    A state whose tensors have no elements on this rank may be missing, because the optimizer creates it again.
    """
    for key, state in expected.items():
        if key not in actual:
            parts = [value for value in state.values() if value.shape]
            assert parts, f"{key} is lost"
            assert all(not value.values.numel() for value in parts), f"{key} is lost"
            continue
        for name, value in state.items():
            assert torch.equal(actual[key][name].values, value.values), f"{key}[{name!r}] changed"


def saved_again(scene: Scene, optimized: Optimized, saved: Mapping[str, Any], way: StateDictMethod) -> Any:
    """Load a state dict from elsewhere into an optimizer, and save that optimizer."""
    fresh = optimized.optimizer(scene.model)
    is_given = scene.rank.rank == 0 or not (way.rank0_only or way.name == "scattered")
    fresh.load_state_dict(way.load(scene, fresh, copied(saved) if is_given else {}))
    return described(FULL.save(scene, fresh))


@clause("distributed.fsdp.fsdp_optim_state.other_worlds")
@pytest.mark.parametrize(
    "worlds",
    [(2, 3), *(pytest.param(worlds, marks=FULL_PROFILE) for worlds in ((4, 1), (1, 4), (3, 2)))],
    ids=str,
)
@share_of_examples(0.15)
@given(
    kind=st.sampled_from(_OF_ELEMENTS),
    saves=setups_of_all(ranks=("default",)),
    loads=setups_of_all(ranks=("default",)),
    way=st.sampled_from([OLDER_FULL, _SCATTERED, *_TYPES[:2]]),
)
def test_full_states_load_on_another_number_of_ranks(
    twins_of: TwinsOf, worlds: tuple[int, int], kind: str, saves: Setup, loads: Setup, way: StateDictMethod
) -> None:
    before, after = map(twins_of, worlds)
    optimized = Optimized(kind)
    first, *_ = before.values(optimizer_states.save_load_and_step, saves, optimized=optimized, way=_TYPES[0])
    saved = as_tensors(first["saved"])
    arguments = {"optimized": optimized, "saved": saved, "way": way}
    for rank, reported in enumerate(after.values(saved_again, loads, **arguments)):
        states = as_tensors(reported)["state"]
        assert states.keys() == saved["state"].keys()
        for name, state in saved["state"].items():
            for key, value in state.items():
                assert torch.equal(states[name][key], value), f"rank {rank}: {name}[{key!r}]"


def exchanged(scene: Scene, writer: str, writers: Setup, optimized: Optimized, way: StateDictMethod) -> Any:
    """Load a state that another library saved for the same module. Return it, and the states after a step."""
    wrote = Scene(scene.rank, load_library(writer), writers, scene.tree)
    saved = way.save(wrote, optimized.stepped(wrote.model))
    fresh = optimized.optimizer(scene.model)
    loaded = way.load(scene, fresh, saved)
    loaded_on_host = on_host(described(loaded))
    fresh.load_state_dict(loaded)
    step(scene.model, fresh)
    return {"loaded": loaded_on_host, "after": described(fresh.state_dict())}


@clause("distributed.fsdp.fsdp_optim_state.exchange")
@each_method(FULL, StateDictMethod("SHARDED"), pytest.param(_SCATTERED, marks=FULL_PROFILE))
@flat_or_originals
def test_states_load_across_libraries(cpu_twins: Twins, way: StateDictMethod, setup: Setup) -> None:
    kind = "adam" if "adam" in kinds_of(setup, way) else "momentum"
    arguments = {"writers": setup, "optimized": Optimized(kind, 2), "way": way}
    both = (cpu_twins.reference, cpu_twins.subject)
    expected, *between = (
        values_of(cpu_twins.of(reader, exchanged, setup, writer=writer.spec, **arguments))
        for reader in both
        for writer in both
    )
    for actual in between:
        for expected_value, actual_value in zip(expected, actual, strict=True):
            assert_same_outcome(Outcome(expected_value), Outcome(actual_value))


@clause("distributed.fsdp.fsdp_optim_state.group_of_the_device")
@each_method(OLDER_FULL, _SCATTERED, _OLDER_SHARDED, *_TYPES)
@flat_or_originals
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_states_load_over_group_of_device_only(
    twins: Twins, strategy: str, setup: Setup, way: StateDictMethod
) -> None:
    """Load states that were saved sharded and offloaded. A rank holds nothing of parameters with one row."""
    tree = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("affine", 1))), dtype=torch.float32)
    writers = replace(setup, ranks="group of device")
    loads = replace(writers, strategy=strategy)
    kind = "adam" if "adam" in kinds_of(writers, way) else "momentum"
    arguments = {"tree": tree, "writers": writers, "optimized": Optimized(kind, 2), "way": way}
    twins.agree(exchanged, loads, EXACT, writer=twins.reference.spec, **arguments)


def outlived(scene: Scene, way: StateDictMethod) -> list[str]:
    """Return the names whose tensors survive the state dict that contained them."""
    optimizer = Optimized().stepped(scene.model)
    saved = way.save(scene, optimizer)
    refs = {name: weakref.ref(state["exp_avg"]) for name, state in saved["state"].items()}
    del saved
    return survivors(refs)


@clause("distributed.fsdp.fsdp_optim_state.freed")
@each_method(FULL, StateDictMethod("SHARDED"))
def test_saved_states_are_freed_with_last_reference(cpu_twins: Twins, way: StateDictMethod) -> None:
    assert not any(cpu_twins.values(outlived, FLAT, way=way))


def trained(scene: Scene, optimized: Optimized, way: StateDictMethod, is_interrupted: bool) -> Any:
    """Train, and save and load into another model halfway if `is_interrupted`. Return weights, losses and states."""
    optimizer = optimized.optimizer(scene.model)
    losses = [_trained_once(scene, optimizer, number) for number in range(2)]
    if is_interrupted:
        states = way.save(scene, optimizer)
        weights = scene.model.state_dict()
        scene.model = scene.wrapped(scene.tree.build(seed_shift=1))
        scene.model.load_state_dict(weights)
        optimizer = optimized.optimizer(scene.model)
        optimizer.load_state_dict(way.load(scene, optimizer, states))
    losses += [_trained_once(scene, optimizer, number) for number in range(2, 5)]
    return {
        "losses": losses,
        "weights": scene.whole_parameters(),
        "states": described(optimizer.state_dict()),
    }


def _trained_once(scene: Scene, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    loss = scene.backward(number)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@clause("distributed.fsdp.fsdp_optim_state.resumes")
@each_method(FULL_ON_RANK_0, StateDictMethod("SHARDED"))
@flat_or_originals
@pytest.mark.parametrize("kind", ["adam", pytest.param("amsgrad", marks=FULL_PROFILE)])
def test_training_resumed_equals_training_not_interrupted(
    cpu_twins: Twins, way: StateDictMethod, setup: Setup, kind: str
) -> None:
    arguments = {"optimized": Optimized(kind, 2), "way": way, "tree": SIMPLE}
    straight, resumed = (
        [*map(Outcome, cpu_twins.values(trained, setup, **arguments, is_interrupted=is_interrupted))]
        for is_interrupted in (False, True)
    )
    assert_ranks_agree(straight, resumed, EXACT)
