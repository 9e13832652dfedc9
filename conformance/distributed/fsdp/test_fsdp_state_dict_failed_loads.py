"""State dicts that fail to load, where torch changes some ranks or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes import state_dicts
from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.state_dicts import (
    WEIGHT,
    Form,
    loaded_in_its_own_way,
    state_dict_of_other_model,
    tried_to_load,
    with_other_values,
)
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    ORIGINALS,
    RankOutcomes,
    Twins,
    TwinsOf,
    each,
    flat_or_originals,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.ranks import RankFault

has_changed, is_as_before = each(lambda value: value["changed"]), each(lambda value: not value["changed"])


def refused_for(rank: int) -> Callable[[RankOutcomes], bool]:
    """Return whether this rank raises, all others report that it could not load, and no rank changed anything."""

    def do(outcomes: RankOutcomes) -> bool:
        errors = [str(value["error"]) for value in values_of(outcomes)]
        reported = [f"rank {rank} could not load" in error for error in errors]
        is_reported = reported == [number != rank for number in range(len(outcomes))]
        return is_as_before(outcomes) and is_reported and "Error: " in errors[rank]

    return do


all_or_nothing = clause("distributed.fsdp.fsdp_state_dict.all_or_nothing")
fails_on_one_rank = pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")


@all_or_nothing
@fails_on_one_rank
@pytest.mark.parametrize("fault", ["missing", "misshaped", "without values"])
@flat_or_originals
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_load_failure_on_one_rank_changes_nothing(cpu_twins: Twins, setup: Setup, fault: str) -> None:
    arguments = {"form": Form(), "fault": fault, "on": [1]}
    cpu_twins.deviate(state_dicts.failed, setup, **arguments, torch_does=has_changed, we_do=refused_for(1))


@all_or_nothing
@fails_on_one_rank
def test_load_failure_on_all_ranks_changes_nothing(cpu_twins: Twins) -> None:
    arguments = {"form": Form("SHARDED"), "fault": "missing", "on": range(cpu_twins.world_size)}
    cpu_twins.deviate(
        state_dicts.failed,
        FLAT,
        **arguments,
        torch_does=has_changed,
        we_do=each(lambda value: "Missing key(s)" in value["error"] and not value["changed"]),
    )


@all_or_nothing
@fails_on_one_rank
@pytest.mark.parametrize("kind", ["SHARDED", "LOCAL"])
@pytest.mark.parametrize("fault", ["missing buffer", "misshaped buffer"])
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_failed_load_of_shards_changes_nothing(cpu_twins: Twins, kind: str, fault: str) -> None:
    last = cpu_twins.world_size - 1
    arguments = {"form": Form(kind), "fault": fault, "on": [last]}
    cpu_twins.deviate(state_dicts.failed, FLAT, **arguments, torch_does=has_changed, we_do=refused_for(last))


def failed_below(scene: Scene) -> dict[str, Any]:
    """Load at a module around units, with a fault on the second rank."""
    state_dict = {
        key.removeprefix("body."): value
        for key, value in with_other_values(state_dict_of_other_model(scene, Form())).items()
        if key.startswith("body.")
    }
    if scene.rank.rank == 1:
        state_dict[WEIGHT.removeprefix("body.")] = torch.ones(2)
    return tried_to_load(scene, state_dict, scene.model.body)


@all_or_nothing
@fails_on_one_rank
@pytest.mark.world_sizes(fewest=2)
def test_load_failure_below_plain_module_keeps_unit_unchanged(cpu_twins: Twins) -> None:
    """The unit with the fault is left unchanged, and nn.Module continues with the next unit."""
    bias = "body.parts.0.inner.bias"

    def is_reported(outcomes: RankOutcomes) -> bool:
        first, second, *_ = [str(value["error"]) for value in values_of(outcomes)]
        is_untouched = each(lambda value: bias not in value["changed"])(outcomes)
        return is_untouched and "rank 1 could not load" in first and "size mismatch" in second

    cpu_twins.deviate(
        failed_below, FLAT, torch_does=each(lambda value: bias in value["changed"]), we_do=is_reported
    )


def shards_loaded_inside_summon(scene: Scene) -> dict[str, Any]:
    """Load shards while the first rank alone has unsharded parameters. The last rank passes no state dict."""
    state_dict: Any = state_dict_of_other_model(scene, Form("SHARDED"))
    if scene.rank.rank == scene.rank.world_size - 1:
        state_dict = None
    with scene.fsdp.summon_full_params(scene.model, rank0_only=True, writeback=False):
        error = tried(lambda: scene.model.load_state_dict(state_dict))
    return {"error": str(error), "loss": scene.backward()}


@all_or_nothing
@fails_on_one_rank
@pytest.mark.world_sizes(fewest=2)
def test_failed_load_of_shards_inside_summon_raises_on_all_ranks(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        shards_loaded_inside_summon,
        FLAT,
        may_fault=True,
        torch_does=lambda outcomes: isinstance(outcomes, RankFault),
        we_do=lambda outcomes: (
            not isinstance(outcomes, RankFault)
            and all("rror" in value["error"] for value in values_of(outcomes))
        ),
    )


class Remembering(nn.Module):
    """Module with an extra state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = ["old"]

    def get_extra_state(self) -> list[str]:
        return self.memory

    def set_extra_state(self, state: list[str]) -> None:
        self.memory = [*state]


def remembered(scene: Scene) -> list[str]:
    """Return the extra state of a module after a load that failed."""
    module = scene.model.body.remembering = Remembering()
    state_dict = scene.model.state_dict()
    del state_dict["head.bias"]
    module.memory = ["new"]
    tried(lambda: scene.model.load_state_dict(state_dict))
    return module.memory


@all_or_nothing
@fails_on_one_rank
def test_failed_load_keeps_extra_states(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        remembered,
        FLAT,
        torch_does=each(lambda memory: memory == ["old"]),
        we_do=each(lambda memory: memory == ["new"]),
    )


def raised_by_a_hook(scene: Scene) -> dict[str, Any]:
    """Load with a user's hook that raises on the last rank."""

    def raises(*args: Any) -> None:
        if scene.rank.rank == scene.rank.world_size - 1:
            raise KeyError("injected")

    scene.model.head.register_load_state_dict_pre_hook(raises)
    return tried_to_load(scene, with_other_values(state_dict_of_other_model(scene, Form())))


@all_or_nothing
@fails_on_one_rank
def test_load_hook_that_raises_changes_nothing(twins_of: TwinsOf) -> None:
    is_reported = each(lambda value: value["error"] == "KeyError: 'injected'")
    twins_of(1).deviate(
        raised_by_a_hook,
        ORIGINALS,
        torch_does=lambda outcomes: is_reported(outcomes) and has_changed(outcomes),
        we_do=lambda outcomes: is_reported(outcomes) and is_as_before(outcomes),
    )


@clause("distributed.fsdp.fsdp_state_dict.misfits")
def test_misfitting_weight_of_custom_load_raises(cpu_twins: Twins) -> None:
    for value in cpu_twins.values(loaded_in_its_own_way, FLAT, fits=False):
        assert "head.weight: rank" in value["error"]
        assert "shape (1, 7), but keeps a tensor of shape (2, 7)" in value["error"]
        assert not value["changed"]


@clause("distributed.fsdp.fsdp_state_dict.misfits")
@pytest.mark.parametrize(
    ("setup", "kind"),
    [
        (FLAT, "ShardedTensor"),
        (ORIGINALS, "ShardedTensor"),
        (Setup(wrap="leaves", ranks="mesh"), "DTensor"),
    ],
    ids=["flat", "originals", "mesh"],
)
@pytest.mark.world_sizes(fewest=2)
def test_shards_of_another_shape_are_refused(cpu_twins: Twins, setup: Setup, kind: str) -> None:
    reported = (
        f"body.parts.0.inner.weight: rank 1 of {cpu_twins.world_size} got a {kind} of shape (2, 7) "
        "but the parameter has the shape"
    )
    arguments = {"form": Form("SHARDED"), "fault": "misshaped part", "on": [1]}
    for value in cpu_twins.values(state_dicts.failed, setup, **arguments):
        assert reported in value["error"]
        assert not value["changed"]


@clause("distributed.fsdp.fsdp_state_dict.misfits")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2)
def test_meta_tensor_is_not_assigned(cpu_twins: Twins, setup: Setup) -> None:
    arguments = {"form": Form(), "fault": "without values", "on": [1], "assign": True}
    for value in cpu_twins.values(state_dicts.failed, setup, **arguments):
        assert "rank 1 got a meta tensor of shape" in value["error"]
        assert not value["changed"]
