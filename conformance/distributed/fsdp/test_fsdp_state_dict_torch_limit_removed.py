"""State dicts that torch loses, moves unnecessarily or cannot load: deviations, asserted for both libraries."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes import state_dicts
from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.state_dicts import (
    Form,
    has_values_of_other_model,
    set_form,
    state_dict_of_other_model,
)
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    ORIGINALS,
    RankOutcomes,
    Twins,
    TwinsOf,
    each,
    flat_or_originals,
    raises,
    values_of,
)
from conformance.judge.clauses import clause

each_kind = pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
more_worlds = pytest.mark.world_sizes(also=[3])


def load_into_model_on_meta(scene: Scene, *, form: Form, assign: bool) -> dict[str, Any]:
    """Load into a model that was wrapped on the meta device. Return what was loaded, and whether torch warned.

    The unit has initialised its modules, except for the one that it ignores.
    """
    origin = scene.wrapped(scene.tree.build(1))
    target = _wrapped_on_meta(scene)
    for model in (origin, target):
        set_form(scene.library, model, form)
    state_dict, expected = origin.state_dict(), scene.whole_parameters(origin)
    ignored = [name for name in expected if name.startswith("body.parts.0.")]
    state_dict |= {name: expected[name] for name in ignored}
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        target.load_state_dict(state_dict, assign=assign)
    actual = scene.whole_parameters(target)
    loaded = {
        name for name in actual if not actual[name].is_meta and torch.equal(actual[name], expected[name])
    }
    return {
        "ignored": loaded.issuperset(ignored),
        "managed": loaded.issuperset(actual.keys() - set(ignored)),
        "warned": any("which is a no-op" in str(warning.message) for warning in reported),
    }


def _wrapped_on_meta(scene: Scene) -> nn.Module:
    plain = scene.tree.build().to("meta")
    return scene.wrap(
        plain,
        use_orig_params=scene.setup.uses_orig_params,
        ignored_modules=[plain.body.parts[0]],
        param_init_fn=lambda module: module.to_empty(device=scene.rank.device, recurse=False),
    )


@clause("distributed.fsdp.fsdp_state_dict.built_on_meta")
@each_kind
@flat_or_originals
def test_model_built_on_meta_loads(cpu_twins: Twins, kind: str, setup: Setup) -> None:
    for value in cpu_twins.values(load_into_model_on_meta, setup, form=Form(kind), assign=False):
        assert value == {"ignored": False, "managed": True, "warned": True}


@clause("distributed.fsdp.fsdp_state_dict.assigned")
@pytest.mark.deviation("fsdp.assigned_parameters")
@each_kind
def test_model_built_on_meta_loads_with_assign(cpu_twins: Twins, kind: str) -> None:
    cpu_twins.deviate(
        load_into_model_on_meta,
        ORIGINALS,
        form=Form(kind),
        assign=True,
        torch_does=each(lambda value: value["ignored"] and not value["managed"]),
        we_do=each(lambda value: value["ignored"] and value["managed"] and not value["warned"]),
        may_agree=cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_state_dict.local_with_original_parameters")
@pytest.mark.deviation("fsdp.local_state_dict_of_originals")
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_local_state_dict_of_original_parameters_loads(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        state_dicts.load_from_other_model,
        ORIGINALS,
        form=Form("LOCAL"),
        torch_does=each(lambda value: "head.weight" in value["keys"] and "Unexpected" in value["reported"]),
        we_do=each(lambda value: "head.weight" not in value["keys"] and value["loaded"]),
    )


@clause("distributed.fsdp.fsdp_state_dict.local_of_originals_by_torch")
@more_worlds
def test_local_state_dict_of_originals_by_torch_loads(cpu_twins: Twins) -> None:
    arguments = {"source": cpu_twins.reference.spec, "form": Form("LOCAL")}
    for value in cpu_twins.values(state_dicts.load_from_library, ORIGINALS, **arguments):
        assert value["keys"] == "<All keys matched successfully>"
        for name, expected in value["expected"].items():
            assert torch.equal(value["whole"][name].values, expected.values), name


@clause("distributed.fsdp.fsdp_state_dict.local_of_replicas")
@pytest.mark.deviation("fsdp.local_of_replicas")
def test_local_state_dict_loads_on_every_replica(twins_of: TwinsOf) -> None:
    twins_of(4).deviate(
        state_dicts.load_from_other_model,
        Setup("HYBRID_SHARD", ranks="groups", shards=2, wrap="leaves"),
        form=Form("LOCAL"),
        torch_does=lambda outcomes: (
            [outcome.raised is not None for outcome in outcomes] == [False, False, True, True]
        ),
        we_do=each(lambda value: value["loaded"]),
    )


@clause("distributed.fsdp.fsdp_state_dict.dtensor_without_mesh")
@pytest.mark.deviation("fsdp.dtensor_without_mesh")
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_dtensor_state_dict_of_process_group_loads(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        state_dicts.load_from_other_model,
        Setup(wrap="leaves", ranks="group"),
        form=Form("SHARDED", {"_use_dtensor": True}),
        torch_does=raises(AttributeError),
        we_do=each(lambda value: value["loaded"] and value["types"] == ["DTensor", "Tensor"]),
    )


def assigned(scene: Scene, *, form: Form) -> dict[str, Any]:
    """Load with `assign` into a wrapped model, and then train. Return whether the model has the values."""
    scene.model.load_state_dict(state_dict_of_other_model(scene, form), assign=True)
    return {"loaded": has_values_of_other_model(scene), "loss": scene.backward()}


@clause("distributed.fsdp.fsdp_state_dict.assigned")
@pytest.mark.deviation("fsdp.assigned_parameters")
@flat_or_originals
@each_kind
@more_worlds
def test_parameters_are_assigned(cpu_twins: Twins, setup: Setup, kind: str) -> None:
    cpu_twins.deviate(
        assigned,
        setup,
        form=Form(kind),
        torch_does=each(lambda value: not value["loaded"]),
        we_do=each(lambda value: value["loaded"]),
        may_agree=cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_state_dict.assigned_shards")
@more_worlds
def test_shards_are_assigned(cpu_twins: Twins) -> None:
    assert all(value["loaded"] for value in cpu_twins.values(assigned, FLAT, form=Form("LOCAL")))


def type_after_error_inside(scene: Scene) -> str:
    """Return the type that is set after an exception inside the context."""
    types = scene.api.StateDictType
    with contextlib.suppress(KeyError), scene.fsdp.state_dict_type(scene.model, types.SHARDED_STATE_DICT):
        raise KeyError("injected")
    return scene.fsdp.get_state_dict_type(scene.model).state_dict_type.name


@clause("distributed.fsdp.fsdp_state_dict.settings_after_an_error")
@pytest.mark.deviation("fsdp.state_dict_type_after_an_error")
def test_state_dict_type_is_restored_after_error(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        type_after_error_inside,
        FLAT,
        torch_does=each(lambda kind: kind == "SHARDED_STATE_DICT"),
        we_do=each(lambda kind: kind == "FULL_STATE_DICT"),
    )


def enter_without_units(scene: Scene) -> Any:
    """Enter the context for a module without units. Return the result or the error."""
    types = scene.api.StateDictType

    def enter() -> str:
        with scene.fsdp.state_dict_type(nn.Linear(1, 1), types.SHARDED_STATE_DICT):
            return "entered"

    return tried(enter)


@clause("distributed.fsdp.fsdp_state_dict.settings_without_units")
@pytest.mark.deviation("fsdp.state_dict_type_without_units")
def test_state_dict_type_takes_module_without_units(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        enter_without_units,
        torch_does=each(lambda value: value.startswith("KeyError")),
        we_do=each(lambda value: value == "entered"),
    )


def save_while_summoned(scene: Scene, *, form: Form, rank0_only: bool = False) -> Any:
    """Return the shapes in a state dict inside summon_full_params, or the error."""
    set_form(scene.library, scene.model, form)
    with scene.fsdp.summon_full_params(scene.model, rank0_only=rank0_only, writeback=False):
        return tried(lambda: {name: tuple(value.shape) for name, value in scene.model.state_dict().items()})


@clause("distributed.fsdp.fsdp_state_dict.while_whole")
@pytest.mark.deviation("fsdp.rank0_only_while_whole")
@pytest.mark.parametrize(
    ("setup", "form", "rank0_only", "of_torchs_others"),
    [
        (FLAT, Form("FULL", {"rank0_only": True}), False, "KeyError"),
        (FLAT, Form("FULL"), True, "AssertionError"),
        (ORIGINALS, Form("FULL"), True, r"\{'[\w.]+': \(\d+,\)"),
    ],
    ids=["saved", "summoned", "summoned originals"],
)
def test_rank0_only_saves_on_first_rank_while_summoned(
    cpu_twins: Twins, setup: Setup, form: Form, rank0_only: bool, of_torchs_others: str
) -> None:
    def saves_on_first_rank_only(outcomes: RankOutcomes, holds_of_others: Callable[[Any], bool]) -> bool:
        first, *others = values_of(outcomes)
        return "head.weight" in first and all(map(holds_of_others, others))

    cpu_twins.deviate(
        save_while_summoned,
        setup,
        form=form,
        rank0_only=rank0_only,
        torch_does=lambda outcomes: saves_on_first_rank_only(
            outcomes, lambda value: re.match(of_torchs_others, str(value)) is not None
        ),
        we_do=lambda outcomes: saves_on_first_rank_only(outcomes, lambda value: not value),
    )


@clause("distributed.fsdp.fsdp_state_dict.while_whole")
@pytest.mark.world_sizes(fewest=2)
def test_shards_are_not_saved_while_parameters_are_whole(cpu_twins: Twins) -> None:
    is_error = each(lambda value: str(value).startswith(("ValueError: ", "RuntimeError: ")))
    cpu_twins.check_both(is_error, save_while_summoned, FLAT, form=Form("LOCAL"))


def hook_sees_full_values(scene: Scene) -> Any:
    """Return whether a module's own hook sees the full parameter and its values in SHARDED_STATE_DICT."""
    whole = scene.whole_parameters()["head.weight"]
    set_form(scene.library, scene.model, Form("SHARDED"))
    sees_values: list[bool] = []

    def after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        value = state_dict[f"{prefix}weight"]
        sees_values.append(tried(lambda: torch.equal(value, whole)) is True)

    scene.model.head._register_state_dict_hook(after_save)
    scene.model.state_dict()
    return sees_values


@clause("distributed.fsdp.fsdp_state_dict.hooks_of_parts")
@pytest.mark.deviation("fsdp.sharded_state_dict_gathers")
@pytest.mark.world_sizes(fewest=2)
def test_sharded_state_dict_hooks_see_no_full_values(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        hook_sees_full_values,
        FLAT,
        torch_does=each(lambda sees_values: sees_values == [True]),
        we_do=each(lambda sees_values: sees_values == [False]),
    )
