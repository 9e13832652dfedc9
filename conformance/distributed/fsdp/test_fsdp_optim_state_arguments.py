"""Each argument of the optimizer-state methods, and their errors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, mesh_of
from conformance.distributed.fsdp.scenes.optimizer_states import (
    FULL,
    FULL_ON_RANK_0,
    OLDER_FULL,
    Optimized,
    StateDictMethod,
    by_name,
    copied,
    described,
    save_load_and_step,
    step,
    unwrapped,
)
from conformance.distributed.fsdp.scenes.scene import TREE, Scene, filled, tried
from conformance.distributed.fsdp.scenes.twins import (
    FULL_PROFILE,
    Twins,
    TwinsOf,
    flat_or_originals,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.outcome import Outcome, assert_same_outcome
from conformance.judge.tolerances import EXACT, TRAINED


def values_like_torch(twins: Twins, program: Any, setup: Setup, **arguments: Any) -> list[Any]:
    return values_of(twins.agree(program, setup, EXACT, **arguments))


def save_and_load_named_optimizer(scene: Scene) -> Any:
    """Save and load an optimizer whose own state dict has names as keys."""
    optimizer = Optimized().stepped(scene.model)
    with FULL.set_on(scene):
        saved = scene.fsdp.optim_state_dict(scene.model, optimizer, by_name(scene.model, optimizer))
        saved_copy = copied(described(saved))
        loaded = scene.fsdp.optim_state_dict_to_load(scene.model, optimizer, saved, is_named_optimizer=True)
    return {"saved": saved_copy, "loaded": described(loaded)}


@clause("distributed.fsdp.fsdp_optim_state.named_optimizer")
@flat_or_originals
@pytest.mark.world_sizes(also=[3])
def test_named_optimizer_is_saved_and_loaded(cpu_twins: Twins, setup: Setup) -> None:
    assert all(
        value["loaded"]["state"]
        for value in values_like_torch(cpu_twins, save_and_load_named_optimizer, setup)
    )


def save_and_load_while_unsharded(scene: Scene) -> Any:
    """Save and load before and after a forward without a backward, which leaves units unsharded."""
    optimizer = Optimized().stepped(scene.model)
    results = []
    for _ in range(2):
        saved = FULL.save(scene, optimizer)
        results.append([copied(described(saved)), described(FULL.load(scene, optimizer, saved))])
        with torch.no_grad():
            scene.forward()
    return results


@clause("distributed.fsdp.fsdp_optim_state.while_whole")
@flat_or_originals
def test_states_are_saved_and_loaded_while_units_are_unsharded(cpu_twins: Twins, setup: Setup) -> None:
    setup = replace(setup, strategy="SHARD_GRAD_OP")
    for sharded, unsharded in values_like_torch(cpu_twins, save_and_load_while_unsharded, setup):
        assert_same_outcome(Outcome(sharded), Outcome(unsharded))


def save_and_load_in_group_of_some(scene: Scene) -> Any:
    """Save and load an optimizer in a group of all ranks but the last. The last rank takes no part."""
    last = scene.rank.world_size - 1
    group = dist.new_group(range(last))
    if scene.rank.rank == last:
        return None
    model = scene.model = scene.wrap(
        scene.plain, process_group=group, use_orig_params=scene.setup.uses_orig_params
    )
    optimizer = Optimized("momentum").stepped(model)
    whole = scene.fsdp.full_optim_state_dict(model, optimizer, group=group)
    rows = scene.fsdp.sharded_optim_state_dict(model, optimizer, group=group)
    again = scene.fsdp.optim_state_dict(model, optimizer, group=group)
    with FULL_ON_RANK_0.set_on(scene):
        from_the_first = scene.fsdp.optim_state_dict_to_load(model, optimizer, again, group=group)
    return {
        "from the first": described(from_the_first),
        "whole": described(whole),
        "rows": described(rows),
        "again": described(again),
        "scattered": described(
            scene.fsdp.scatter_full_optim_state_dict(whole, model, optim=optimizer, group=group)
        ),
        "loaded": described(scene.fsdp.optim_state_dict_to_load(model, optimizer, again, group=group)),
    }


@clause("distributed.fsdp.fsdp_optim_state.some_ranks")
@pytest.mark.parametrize(
    "setup",
    [Setup(), pytest.param(Setup(arguments={"use_orig_params": True}), marks=FULL_PROFILE)],
    ids=["flat", "originals"],
)
@pytest.mark.world_sizes(fewest=3)
def test_ranks_that_have_no_model_need_not_take_part(cpu_twins: Twins, setup: Setup) -> None:
    *_, last_with_it, without = values_like_torch(cpu_twins, save_and_load_in_group_of_some, setup)
    assert without is None
    assert last_with_it["again"]["state"]


def load_state_of_first_rank(scene: Scene) -> Any:
    """Load with `rank0_only` while the other ranks pass an unrelated state."""
    way = FULL_ON_RANK_0
    optimizer = Optimized("momentum").stepped(scene.model)
    saved = way.save(scene, optimizer)
    others = {"state": {"nobody's": {}}, "param_groups": []}
    return described(way.load(scene, optimizer, others if scene.rank.rank else saved))


@clause("distributed.fsdp.fsdp_optim_state.some_ranks")
@flat_or_originals
def test_rank0_only_loads_state_of_first_rank(cpu_twins: Twins, setup: Setup) -> None:
    assert all(value["state"] for value in values_like_torch(cpu_twins, load_state_of_first_rank, setup))


def save_and_load_in_pairs(scene: Scene) -> Any:
    """Save in pairs of ranks that each have their own model.

    Return the states and the model after it was loaded again.
    """
    pairs = [[first, first + 1] for first in range(0, scene.rank.world_size, 2)]
    group, _ = dist.new_subgroups_by_enumeration(pairs)
    model = scene.model = scene.wrap(scene.plain, process_group=group, use_orig_params=True)
    optimizer = Optimized("momentum").stepped(model)
    saved = []
    for way in (FULL, FULL_ON_RANK_0, StateDictMethod("SHARDED")):
        with way.set_on(scene):
            saved.append(described(scene.fsdp.optim_state_dict(model, optimizer, group=group)))
    with StateDictMethod("SHARDED").set_on(scene):
        state_dict = model.state_dict()
        step(model, optimizer)
        model.load_state_dict(state_dict)
    return {"saved": saved, "loaded": scene.whole_parameters(model)}


@clause("distributed.fsdp.fsdp_optim_state.some_ranks")
def test_states_are_saved_and_loaded_by_each_group(twins_of: TwinsOf) -> None:
    values = values_of(twins_of(4).agree(save_and_load_in_pairs))
    saved = [[bool(state.get("state")) for state in value["saved"]] for value in values]
    assert saved == 2 * [[True] * 3, [True, False, True]]


def save_in_first_replica(scene: Scene) -> Any:
    """Save the optimizer of a hybrid model in its first replica only, while all ranks train."""
    mesh = mesh_of(scene.rank, 2)
    optimizer = Optimized("momentum").stepped(scene.model)
    scene.backward()
    optimizer.step()
    saved: Any = None
    if mesh.get_local_rank(0) == 0:
        with StateDictMethod("SHARDED").set_on(scene):
            saved = described(scene.fsdp.optim_state_dict(scene.model, optimizer, group=mesh.get_group(1)))
    optimizer.zero_grad()
    return {"saved": saved, "loss": scene.backward(1), "gradients": scene.gradients()}


@clause("distributed.fsdp.fsdp_optim_state.some_ranks")
@flat_or_originals
def test_first_replica_saves_without_others(twins_of: TwinsOf, setup: Setup) -> None:
    hybrid = replace(setup, strategy="HYBRID_SHARD", ranks="groups", shards=2)
    first, second, *others = values_of(twins_of(4).agree(save_in_first_replica, hybrid, TRAINED))
    assert first["saved"]["state"]
    assert second["saved"]["state"]
    assert [value["saved"] for value in others] == [None, None]


def save_and_load_user_state(scene: Scene) -> Any:
    """Save and load a state that belongs to no parameter. Load a state dict without parameter groups."""
    optimizer = Optimized().stepped(scene.model)
    state_dict = optimizer.state_dict()
    state_dict["state"]["mine"] = {"numbers": torch.tensor([1.0, 2.0]), "name": "mine"}
    with FULL.set_on(scene):
        saved = scene.fsdp.optim_state_dict(scene.model, optimizer, state_dict)
        saved_copy = copied(described(saved))
        without = {"state": saved["state"]}
        loaded = scene.fsdp.optim_state_dict_to_load(scene.model, optimizer, without)
    return {"saved": saved_copy, "loaded": described(loaded)}


@clause("distributed.fsdp.fsdp_optim_state.users_own")
@flat_or_originals
def test_user_state_without_parameter_is_kept(cpu_twins: Twins, setup: Setup) -> None:
    for value in values_like_torch(cpu_twins, save_and_load_user_state, setup):
        assert value["loaded"]["state"]["mine"]["name"] == "mine"


def round_trip_submodule_called_module(scene: Scene) -> Any:
    """Use a module called `module`, the name that wrappers give to their module and remove from other names."""
    parts = {"module": nn.Linear(3, 4), "head": nn.Linear(4, 2)}
    plain_model = filled(nn.Sequential(OrderedDict(parts)))
    scene.model = scene.wrapped(plain_model)
    return save_load_and_step(scene, Optimized("momentum"), FULL)


@clause("distributed.fsdp.fsdp_optim_state.there_and_back")
@flat_or_originals
def test_submodule_called_module_is_saved(cpu_twins: Twins, setup: Setup) -> None:
    for value in values_like_torch(cpu_twins, round_trip_submodule_called_module, setup):
        assert "module.weight" in value["saved"]["state"]


def loaded_directly(scene: Scene, directly: bool) -> Any:
    """Return the state of a fresh optimizer after `optim_state_dict_to_load` with or without `load_directly`."""
    optimizer = Optimized().stepped(scene.model)
    saved = FULL.save(scene, optimizer)
    fresh = Optimized().optimizer(scene.model)
    FULL.load(scene, fresh, saved, load_directly=directly)
    return described(fresh.state_dict())


@clause("distributed.fsdp.fsdp_optim_state.load_directly")
@flat_or_originals
@pytest.mark.parametrize("directly", [False, True])
def test_optimizer_loads_only_with_load_directly(cpu_twins: Twins, setup: Setup, directly: bool) -> None:
    for value in values_like_torch(cpu_twins, loaded_directly, setup, directly=directly):
        assert bool(value["state"]) is directly


def save_and_load_by_optim_input(scene: Scene) -> Any:
    """Pass the optimizer's input, in every form, instead of the optimizer."""
    fsdp, model = scene.fsdp, scene.model
    parameters = list(model.parameters())
    backwards = [{"params": parameters[1:]}, {"params": parameters[:1]}]
    optimizer = torch.optim.SGD([dict(group) for group in backwards], lr=0.05, momentum=0.5)
    step(model, optimizer)
    saved = fsdp.full_optim_state_dict(model, optimizer, backwards, False)
    return {
        "saved": copied(described(saved)),
        "saved by a number": tried(lambda: fsdp.full_optim_state_dict(model, optimizer, 3)),
        "saved by nothing": tried(lambda: fsdp.full_optim_state_dict(model, optimizer, [])),
        "as the optimizer's": described(fsdp.shard_full_optim_state_dict(saved, model, optim=optimizer)),
        "by its order": described(fsdp.shard_full_optim_state_dict(saved, model)),
        "as groups": described(fsdp.shard_full_optim_state_dict(saved, model, backwards)),
        "scattered": described(fsdp.scatter_full_optim_state_dict(saved, model, backwards)),
        "scattered as the optimizer's": described(
            fsdp.scatter_full_optim_state_dict(saved, model, optim=optimizer)
        ),
        "scattered by its order": described(fsdp.scatter_full_optim_state_dict(saved, model)),
        "as tensors": described(fsdp.shard_full_optim_state_dict(saved, model, parameters[::-1])),
        "number": tried(lambda: fsdp.shard_full_optim_state_dict(saved, model, 3)),
        "nothing": tried(lambda: fsdp.shard_full_optim_state_dict(saved, model, [])),
        "mixed": tried(lambda: fsdp.shard_full_optim_state_dict(saved, model, [parameters[0], {}])),
        "no params": tried(lambda: fsdp.shard_full_optim_state_dict(saved, model, [{"lr": 1.0}])),
    }


@clause("distributed.fsdp.fsdp_optim_state.optim_input")
@flat_or_originals
def test_optim_input_replaces_optimizer(cpu_twins: Twins, setup: Setup) -> None:
    first, *_ = cpu_twins.agree(save_and_load_by_optim_input, setup, EXACT)
    assert any("optim_input" in text for _, text in first.warned)


def rekeyed(scene: Scene) -> Any:
    """Rekey from numbers to names, from names to numbers, and to the same keys."""
    types = scene.api.OptimStateKeyType
    rekey = scene.fsdp.rekey_optim_state_dict
    plain_model = scene.tree.build()
    optimizer = Optimized(groups=2).stepped(plain_model)
    numbered, named = copied(optimizer.state_dict()), copied(by_name(plain_model, optimizer))
    mixed = [
        {"state": {key: {}, other: {}}, "param_groups": []}
        for key, other in [(0, "a"), ("a", None), (None, 0)]
    ]
    in_order = list(plain_model.parameters())
    alone = Optimized().stepped(plain_model).state_dict()
    empty = {"state": {}, "param_groups": numbered["param_groups"]}
    return {
        "numbers as they are": rekey(numbered, types.PARAM_ID, plain_model, optim=optimizer) is numbered,
        "no state": [rekey(empty, kind, plain_model, optim=optimizer) is empty for kind in types],
        "to names": described(rekey(numbered, types.PARAM_NAME, plain_model, optim=optimizer)),
        "to numbers": described(rekey(named, types.PARAM_ID, plain_model, optim=optimizer)),
        "as it is": rekey(named, types.PARAM_NAME, plain_model, optim=optimizer) is named,
        "by the model's order": described(rekey(alone, types.PARAM_NAME, plain_model)),
        "by what it was made of": described(rekey(alone, types.PARAM_NAME, plain_model, in_order[::-1])),
        "no such type": tried(lambda: rekey(named, "names", plain_model)),
        "mixed": [tried(partial(rekey, state, types.PARAM_NAME, plain_model)) for state in mixed],
        "wrapped": tried(
            lambda: described(
                rekey(numbered, types.PARAM_NAME, scene.model, optim=Optimized().optimizer(scene.model))
            )
        ),
    }


@clause("distributed.fsdp.fsdp_optim_state.rekey")
@flat_or_originals
def test_rekeying_matches_torch(cpu_twins: Twins, setup: Setup) -> None:
    values_like_torch(cpu_twins, rekeyed, setup)


def rekeyed_by_torchs_types(scene: Scene) -> Any:
    """Return the keys after rekeying by torch's OptimStateKeyType and by the library's own."""
    model = scene.tree.build()
    optimizer = Optimized().stepped(model)
    rekey, own = scene.fsdp.rekey_optim_state_dict, scene.api.OptimStateKeyType
    state_dict = optimizer.state_dict()
    return {
        "by torch's": [*rekey(state_dict, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)["state"]],
        "by its own": [*rekey(state_dict, own.PARAM_NAME, model, optim=optimizer)["state"]],
    }


@clause("distributed.fsdp.fsdp_optim_state.rekey")
def test_key_types_of_torch_are_taken(cpu_twins: Twins) -> None:
    names = [name for name, _ in TREE.build().named_parameters()]
    for value in cpu_twins.values(rekeyed_by_torchs_types):
        assert value == {"by torch's": names, "by its own": names}


def errors_of_loading(scene: Scene) -> dict[str, Any]:
    """Return the errors for faulty state dicts that are complete on every rank."""
    optimized = Optimized("adam")
    optimizer = optimized.optimizer(scene.model)

    def load(change: Callable[[Any], None]) -> Any:
        state_dict = copied(unwrapped(optimized))
        change(state_dict)
        return tried(lambda: described(OLDER_FULL.load(scene, optimizer, state_dict)))

    return {
        "no state": load(lambda state_dict: state_dict.pop("state")),
        "names": load(lambda state_dict: _second(state_dict).pop("exp_avg")),
        "types": load(lambda state_dict: _second(state_dict).update(exp_avg=1.0)),
        "dtypes": load(
            lambda state_dict: _second(state_dict).update(exp_avg=_second(state_dict)["exp_avg"].double())
        ),
        "numbers": load(lambda state_dict: _second(state_dict).update(step=torch.tensor(7.0))),
        "no numbers": load(lambda state_dict: state_dict["state"].pop("body.parts.0.inner.bias")),
        "own values": load(lambda state_dict: _add_own(state_dict, ["same", "same"])),
        "other values": load(lambda state_dict: _add_own(state_dict, ["one", "other"])),
        "an unknown name": load(lambda state_dict: state_dict["param_groups"][0]["params"].append("unknown")),
        "nothing": load(lambda state_dict: [state.clear() for state in state_dict["state"].values()]),
    }


def _second(state_dict: Any) -> Any:
    return state_dict["state"]["body.parts.0.inner.bias"]


def _add_own(state_dict: Any, values: Iterable[str]) -> None:
    names = ("body.parts.0.inner.weight", "body.parts.0.inner.bias")
    for name, value in zip(names, values, strict=True):
        state_dict["state"][name]["own"] = value


def errors_of_saving(scene: Scene) -> dict[str, Any]:
    """Return the errors of saving an incomplete optimizer, a step on rank 0 only, and units of both parameter types."""
    parameters = list(scene.model.parameters())
    incomplete = torch.optim.SGD(parameters[1:], lr=0.05, momentum=0.5)
    step(scene.model, incomplete)
    uneven = torch.optim.SGD(parameters, lr=0.05, momentum=0.5)
    if scene.rank.rank == 0:
        step(scene.model, uneven)
    of_both_kinds = scene.tree.build()
    of_both_kinds.head = scene.wrap(of_both_kinds.head, use_orig_params=not scene.setup.uses_orig_params)
    of_both_kinds = scene.wrap(of_both_kinds, use_orig_params=scene.setup.uses_orig_params)
    optimizer = Optimized().optimizer(of_both_kinds)
    empty = {"state": {}, "param_groups": []}
    return {
        "some": tried(lambda: described(OLDER_FULL.save(scene, incomplete))),
        "uneven": tried(lambda: described(OLDER_FULL.save(scene, uneven))),
        "both kinds": tried(lambda: scene.fsdp.optim_state_dict(of_both_kinds, optimizer)),
        "both kinds to load": tried(
            lambda: scene.fsdp.optim_state_dict_to_load(of_both_kinds, optimizer, empty)
        ),
    }


@clause("distributed.fsdp.fsdp_optim_state.refused")
@flat_or_originals
@pytest.mark.parametrize("program", [errors_of_loading, errors_of_saving], ids=["load", "save"])
def test_faulty_states_are_refused_like_torch(cpu_twins: Twins, setup: Setup, program: Any) -> None:
    for value in values_like_torch(cpu_twins, program, setup):
        # A single rank may save any state.
        assert cpu_twins.is_alone or any(isinstance(answer, str) for answer in value.values())
