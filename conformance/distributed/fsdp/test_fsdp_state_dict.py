"""State dicts, compared with torch's key by key, and loaded into models of the other library."""

from __future__ import annotations

import copy
import functools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from conformance.distributed.fsdp.scenes import state_dicts
from conformance.distributed.fsdp.scenes.fsdp_training import Setup, clean
from conformance.distributed.fsdp.scenes.module_trees import ModuleTree
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.distributed.fsdp.scenes.scene import Scene, named, survivors, tried
from conformance.distributed.fsdp.scenes.state_dicts import (
    Form,
    described_entry,
    load_from_other_model,
    set_form,
    unsharded_state,
    with_other_values,
)
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    Twins,
    TwinsOf,
    each,
    each_strategy,
    flat_or_originals,
    leaf_by_leaf,
    raises,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.tolerances import EXACT
from conformance.strategies.modules import module_trees
from conformance.strategies.sharding import setups


@st.composite
def forms(draw: st.DrawFn, setup: Setup) -> Form:
    """Draw a state dict configuration. LOCAL_STATE_DICT is drawn only if torch supports it: for flat parameters."""
    has_local = not setup.uses_orig_params and setup.ranks != "mesh"
    kind = draw(st.sampled_from(["FULL", "SHARDED", "LOCAL"] if has_local else ["FULL", "SHARDED"]))
    # torch cannot offload a full state dict on a CPU.
    flag = "rank0_only" if kind == "FULL" else "offload_to_cpu"
    return Form(kind, {flag: draw(st.booleans())})


@st.composite
def models(draw: st.DrawFn, **options: Any) -> tuple[Setup, ModuleTree]:
    # Wrapping by size is left out, because torch may assign a weight that two modules share to two units.
    wraps = ("root", "leaves", "groups", "manual")
    strategy = draw(st.sampled_from(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]))
    setup = draw(setups(strategy=strategy, wraps=wraps, **options))
    if setup.wrap != "manual":
        ignored = st.sampled_from(["", "", "ignored_modules", "ignored_states", "parameters"])
        setup = replace(setup, ignored=draw(ignored))
    frozen = ("none", "all") if setup.wrap == "leaves" else ("none",)
    return setup, draw(module_trees(frozen=frozen, dtype=torch.float32))


def places(setup: Setup, *more: str) -> st.SearchStrategy[str]:
    """Draw the module whose state dict is requested.

    A module inside a unit has no defined state dict, so `body` is drawn only if it holds complete units.
    """
    holds_whole_units = setup.wrap in ("leaves", "manual")
    return st.sampled_from(["root", *more, "body"] if holds_whole_units else ["root", *more])


each_kind = pytest.mark.parametrize("kind", ["FULL", "SHARDED"])


@clause("distributed.fsdp.fsdp_state_dict.saved")
@share_of_examples(0.7)
@given(data=st.data())
def test_saved_state_dict_matches_torch(twins: Twins, data: st.DataObject) -> None:
    precisions = [None, None, {"buffer_dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16}]
    setup, tree = data.draw(models(mixed_precision=data.draw(st.sampled_from(precisions))))
    form = data.draw(forms(setup))
    # If only rank 0 gets a full state dict inside summon_full_params, torch's other ranks raise.
    can_be_inside = form.kind != "LOCAL" and not form.config.get("rank0_only")
    twins.agree(
        state_dicts.save_after_backward,
        setup,
        EXACT,
        may_raise=True,
        tree=tree,
        form=form,
        at=data.draw(places(setup, "inner")),
        inside=can_be_inside and data.draw(st.booleans()),
        options=data.draw(st.sampled_from([{}, {}, {"prefix": "a."}, {"keep_vars": True}])),
    )


@clause("distributed.fsdp.fsdp_state_dict.saved")
@pytest.mark.parametrize("by", ["groups", "meshes"])
def test_state_dict_of_replicas_matches_torch(twins_of: TwinsOf, by: str) -> None:
    setup = Setup("HYBRID_SHARD", ranks=by, shards=2, wrap="leaves")
    twins_of(4).agree(state_dicts.save_after_backward, setup, EXACT, form=Form("SHARDED"))


def ranks_of_shards(scene: Scene, *, form: Form) -> set[int]:
    """Return the ranks that the metadata of this rank's shards name."""
    state_dicts.set_form(scene.library, scene.model, form)
    return {
        state_dicts.rank_of(shard.metadata)
        for value in scene.model.state_dict().values()
        if isinstance(value, ShardedTensor)
        for shard in value.local_shards()
    }


@clause("distributed.fsdp.fsdp_state_dict.saved")
@pytest.mark.parametrize("kind", ["SHARDED", "LOCAL"])
def test_local_shards_name_their_rank(twins_of: TwinsOf, kind: str) -> None:
    outcomes = twins_of(2).agree(ranks_of_shards, FLAT, form=Form(kind))
    assert [outcome.value for outcome in outcomes] == [{0}, {1}]


@clause("distributed.fsdp.fsdp_state_dict.saved")
@each_kind
def test_state_dict_of_cast_buffers_matches_torch(cpu_twins: Twins, kind: str) -> None:
    setup = replace(FLAT, mixed_precision={"buffer_dtype": torch.bfloat16})
    cpu_twins.agree(state_dicts.save_after_backward, setup, EXACT, form=Form(kind))


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@share_of_examples(0.4)
@given(data=st.data())
def test_state_dicts_load_across_libraries(twins: Twins, data: st.DataObject) -> None:
    setup, tree = data.draw(models())
    form = Form(data.draw(forms(setup)).kind)
    options: dict[str, Any] = {
        "at": data.draw(places(setup)),
        "inside": form.kind != "LOCAL" and data.draw(st.booleans()),
    }
    pairs = (
        (twins.reference, twins.subject),
        (twins.subject, twins.reference),
        (twins.subject, twins.subject),
    )
    for saver, loader in pairs:
        arguments = {"tree": tree, "source": saver.spec, "form": form, **options}
        for state in values_of(twins.of(loader, state_dicts.load_from_library, setup, **arguments)):
            assert state["keys"] == "<All keys matched successfully>"
            assert state["buffers"].keys() == state["expected buffers"].keys()
            loaded = state["whole"] | state["buffers"]
            for name, expected in (state["expected"] | state["expected buffers"]).items():
                if options["at"] == "root" or name.startswith("body"):
                    assert torch.equal(loaded[name].values, expected.values), name


def loads_by_swapping(scene: Scene, *, form: Form) -> dict[str, Any]:
    """Load while modules swap tensors instead of copying into them, and then train."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        reported = load_from_other_model(scene, form=form)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return reported | {"loss": scene.backward(), "shards": named(scene.model)}


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@each_kind
@flat_or_originals
def test_modules_may_swap_tensors(twins: Twins, kind: str, setup: Setup) -> None:
    for outcome in twins.agree(loads_by_swapping, setup, form=Form(kind)):
        assert outcome.value["loaded"]


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_local_state_dict_loads_on_rank_without_elements(cpu_twins: Twins) -> None:
    """The unit has two elements, so the third rank holds none."""
    for outcome in cpu_twins.agree(state_dicts.load_from_other_model, FLAT, form=Form("LOCAL")):
        assert outcome.value["loaded"]


def with_a_late_parameter(scene: Scene, *, form: Form, of: str) -> dict[str, Any]:
    """Save and load a parameter that was added inside a unit after wrapping.

    The unit around the module manages the parameter.
    """
    kind = {"use_orig_params": scene.setup.uses_orig_params}
    inner = scene.plain.body = scene.wrap(scene.plain.body, **kind)
    inner.module.get_submodule(of).late = nn.Parameter(torch.ones(4))
    scene.model = scene.wrap(scene.plain, **kind)
    set_form(scene.library, scene.model, form)
    state_dict = with_other_values(copy.deepcopy(scene.model.state_dict()))
    with torch.no_grad():
        for parameter in scene.model.parameters():
            parameter.zero_()
    keys = scene.model.load_state_dict(state_dict)
    whole = unsharded_state(scene)
    return {
        "names": sorted(state_dict),
        "keys": repr(keys),
        "state": {name: whole[name] for name in sorted(whole)},
    }


@clause("distributed.fsdp.fsdp_state_dict.exchanged")
@each_kind
@flat_or_originals
def test_late_parameter_is_saved_and_loaded(cpu_twins: Twins, setup: Setup, kind: str) -> None:
    arguments = {"form": Form(kind), "of": "parts.0.inner"}
    for outcome in cpu_twins.agree(with_a_late_parameter, setup, EXACT, **arguments):
        assert "body.parts.0.inner.late" in outcome.value["names"]
        assert "All keys matched" in outcome.value["keys"]


@clause("distributed.fsdp.fsdp_state_dict.came_late")
@pytest.mark.deviation("fsdp.late_parameter_of_a_wrapped_module")
@each_kind
@flat_or_originals
def test_late_parameter_of_wrapped_module_is_saved_and_loaded(
    cpu_twins: Twins, setup: Setup, kind: str
) -> None:
    are_parts = kind == "SHARDED" and not cpu_twins.is_alone  # sharded entries are loaded as saved
    expected = torch.full((4,), 1.0 if are_parts else 2.0)

    def holds_of_late(state: dict[str, Any]) -> bool:
        return torch.equal(state["body.late"].values, expected)

    cpu_twins.deviate(
        with_a_late_parameter,
        setup,
        form=Form(kind),
        of="",
        torch_does=raises(AssertionError, "FSDP assumes body..late is in the state_dict"),
        we_do=each(lambda value: "All keys matched" in value["keys"] and holds_of_late(value["state"])),
    )


def settings(scene: Scene) -> dict[str, Any]:
    """Return the settings before and after changes, and the errors of settings that are refused."""
    fsdp, api, types = scene.fsdp, scene.api, scene.api.StateDictType
    reported: dict[str, Any] = {"at first": str(fsdp.get_state_dict_type(scene.model))}
    for kind in types:
        reported[f"before {kind}"] = str(fsdp.set_state_dict_type(scene.model, kind))
        reported[f"after {kind}"] = _set_now(scene)
    rank0_configs = (api.FullStateDictConfig(rank0_only=True), api.FullOptimStateDictConfig(rank0_only=True))
    with fsdp.state_dict_type(scene.model, types.FULL_STATE_DICT, *rank0_configs):
        inside = fsdp.get_state_dict_type(scene.model)
        reported["inside"] = [str(inside), inside.state_dict_config is rank0_configs[0]]
    reported["outside"] = _set_now(scene)
    refused: list[tuple[Any, ...]] = [
        (types.FULL_STATE_DICT, api.ShardedStateDictConfig()),
        (types.FULL_STATE_DICT, None, api.LocalOptimStateDictConfig()),
        ("FULL_STATE_DICT",),
    ]
    reported["refused"] = [
        tried(functools.partial(fsdp.set_state_dict_type, scene.model, *arguments)) for arguments in refused
    ]
    fsdp.set_state_dict_type(scene.model, types.FULL_STATE_DICT)
    reported["of no unit"] = [
        str(fsdp.get_state_dict_type(nn.Linear(1, 1))),
        str(fsdp.set_state_dict_type(nn.Linear(1, 1), types.FULL_STATE_DICT)),
    ]
    fsdp.set_state_dict_type(scene.units[-1], types.SHARDED_STATE_DICT)
    reported["set apart"] = [
        tried(lambda: fsdp.get_state_dict_type(scene.model)),
        tried(lambda: fsdp.set_state_dict_type(scene.model, types.FULL_STATE_DICT)),
    ]
    return reported


def _set_now(scene: Scene) -> str:
    try:
        return str(scene.fsdp.get_state_dict_type(scene.model))
    except RuntimeError as error:
        return (
            f"RuntimeError: {' '.join(error.args)}"  # torch 2.11 passes its sentences as separate arguments
        )


@clause("distributed.fsdp.fsdp_state_dict.settings")
@pytest.mark.parametrize("by", ["default", "mesh"])
def test_state_dict_settings_match_torch(twins: Twins, by: str) -> None:
    twins.agree(settings, Setup(wrap="leaves", ranks=by), EXACT)


def outlived(scene: Scene, *, form: Form) -> list[str]:
    """Return the keys whose tensors survive the state dict. Buffers are left out, because the model owns them."""
    set_form(scene.library, scene.model, form)
    own = {id(buffer) for buffer in scene.model.buffers()}
    state_dict = scene.model.state_dict()
    refs = {key: weakref.ref(value) for key, value in state_dict.items() if id(value) not in own}
    del state_dict
    return survivors(refs)


@clause("distributed.fsdp.fsdp_state_dict.freed")
@each_kind
def test_saved_state_dict_is_freed_with_last_reference(cpu_twins: Twins, kind: str) -> None:
    assert not any(cpu_twins.values(outlived, FLAT, form=Form(kind)))


def hooked(scene: Scene) -> dict[str, Any]:
    """Return the arguments of hooks on a module inside a unit and on the root. The hooks change names and values."""
    calls: list[Any] = []
    head, root = scene.model.head, scene.model

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        calls.append(["before saving", type(module).__name__, prefix, keep_vars])

    def after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        calls.append(["after saving", prefix, sorted(state_dict), metadata])
        state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"].half()
        state_dict[f"{prefix}extra"] = torch.ones(1)

    def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        calls.append(["before loading", prefix, sorted(state_dict)])
        state_dict.pop(f"{prefix}extra", None)
        state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"].float() * 2

    def after_load(module: nn.Module, keys: Any) -> None:
        calls.append(["after loading", repr(keys)])

    head.register_state_dict_pre_hook(before_save)
    head._register_state_dict_hook(after_save)
    head.register_load_state_dict_pre_hook(before_load)
    root.register_load_state_dict_post_hook(after_load)
    state_dict = root.state_dict()
    calls.append([(key, described_entry(value)) for key, value in state_dict.items()])
    root.load_state_dict(state_dict)
    return {"seen": calls, "whole": scene.whole_parameters(root)}


@clause("distributed.fsdp.fsdp_state_dict.hooks")
@flat_or_originals
@pytest.mark.parametrize("wrap", ["root", "leaves"])
def test_state_dict_hooks_match_torch(twins: Twins, wrap: str, setup: Setup) -> None:
    twins.agree(hooked, replace(setup, wrap=wrap), EXACT)


def loaded_beside_own_parameters(scene: Scene) -> dict[str, Any]:
    """Load a full state dict with one new value. The other values are the model's own parameters.

    torch's `set_model_state_dict` makes such a dict of a partial one, for example of an adapter.
    """
    own = {clean(name): param for name, param in scene.model.named_parameters()}
    whole = scene.whole_parameters()
    name = next(iter(whole))
    keys = scene.model.load_state_dict({**own, name: whole[name] + 1}, strict=False)
    return {"keys": str(keys), "whole": scene.whole_parameters()}


@clause("distributed.fsdp.fsdp_state_dict.own_parameters")
@each_strategy
def test_own_parameters_in_state_dict_keep_values(twins: Twins, strategy: str) -> None:
    setup = leaf_by_leaf(strategy, use_orig_params=True)
    twins.agree(loaded_beside_own_parameters, setup, EXACT)


class PartlyFrozen(nn.Module):
    """Parameters of one module, of which the middle one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.weight_of_head = nn.Parameter(torch.ones(2, 3))


def names_after(scene: Scene, *, how: str) -> list[str]:
    """Return the names of a unit's parameters after it was cast, or after its state dict was loaded."""
    model = scene.wrap(PartlyFrozen(), use_orig_params=True)
    if how == "cast":
        model.double()
    else:
        with scene.fsdp.state_dict_type(model, scene.api.StateDictType[how]):
            model.load_state_dict(model.state_dict())
    return [name for name, _ in model.named_parameters()]


@clause("distributed.fsdp.fsdp_state_dict.order_of_parameters")
@pytest.mark.parametrize("how", ["cast", "FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_parameters_keep_their_order(cpu_twins: Twins, how: str) -> None:
    """An optimizer that is created afterwards has its states in this order."""
    expected = ["weight", "bias", "frozen", "weight_of_head"]
    for outcomes in cpu_twins.of_both(names_after, how=how):
        for names in values_of(outcomes):
            assert [name.rpartition(".")[2] for name in names] == expected
