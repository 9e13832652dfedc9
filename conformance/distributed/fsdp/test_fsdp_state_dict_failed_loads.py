"""State dicts that do not fit the model: the error on each rank, and which values change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.scene import Scene, tried
from conformance.distributed.fsdp.scenes.state_dicts import (
    Form,
    set_form,
    state_dict_of_other_model,
    unsharded_state,
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
from conformance.judge.tolerances import EXACT
from conformance.ranks import RankFault

WEIGHT, BUFFER = "body.parts.0.inner.weight", "body.parts.1.parts.1.inner.running_mean"


def _split_into_rows(state_dict: dict[str, Any]) -> None:
    """Split the local shards of a ShardedTensor into one shard for each row."""
    sharded = state_dict[WEIGHT]
    if isinstance(sharded, ShardedTensor):
        parts = [
            Shard.from_tensor_and_offsets(row, [shard.metadata.shard_offsets[0] + number, 0], dist.get_rank())
            for shard in sharded.local_shards()
            for number, row in enumerate(shard.tensor.split(1))
        ]
        state_dict[WEIGHT] = ShardedTensor._init_from_local_shards(parts, sharded.size())


def _drop_values(state_dict: dict[str, Any]) -> None:
    """Put a tensor on the meta device. `ShardedTensor.to("meta")` asks for an accelerator from torch 2.14 on."""
    value = state_dict[WEIGHT]
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            shard.tensor = shard.tensor.to("meta")
    else:
        state_dict[WEIGHT] = value.to("meta")


def _lengthen_shards(state_dict: dict[str, Any]) -> None:
    """Append an element to each local shard, like a shard that was saved with its padding."""
    for value in state_dict.values():
        for shard in value.local_shards() if isinstance(value, ShardedTensor) else ():
            shard.tensor = nn.functional.pad(shard.tensor, [0, 1])


# Changes that make a state dict faulty, by fault.
DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda state_dict: (state_dict.pop(WEIGHT), state_dict.pop("head.bias")),
    "missing buffer": lambda state_dict: state_dict.pop(BUFFER),
    "unexpected": lambda state_dict: state_dict.update(
        {"head.more": torch.ones(1), "body.parts.0.more": torch.ones(1)}
    ),
    "misshaped": lambda state_dict: state_dict.update({WEIGHT: torch.ones(2), "head.bias": torch.ones(7)}),
    "misshaped buffer": lambda state_dict: state_dict.update({BUFFER: torch.ones(2)}),
    "a word": lambda state_dict: state_dict.update({WEIGHT: "word"}),
    "whole": lambda state_dict: state_dict.update({WEIGHT: torch.ones(4, 3)}),
    "without values": _drop_values,
    "two parts": _split_into_rows,
    "with padding": _lengthen_shards,
    "misshaped part": lambda state_dict: state_dict.update({WEIGHT: state_dict["head.weight"]}),
}

has_changed, is_as_before = each(lambda value: value["changed"]), each(lambda value: not value["changed"])


def load_with_fault(
    scene: Scene, *, form: Form, fault: str, on: Sequence[int], assign: bool = False
) -> dict[str, Any]:
    """Load a state dict that has a fault on some ranks. Return the error, the changed values and the next loss."""
    state_dict = with_other_values(state_dict_of_other_model(scene, form))
    if scene.rank.rank in on:
        DAMAGES[fault](state_dict)
    return try_to_load(scene, state_dict, assign=assign)


def try_to_load(
    scene: Scene, state_dict: dict[str, Any], module: nn.Module | None = None, assign: bool = False
) -> dict[str, Any]:
    before = unsharded_state(scene)
    error = tried(lambda: (module or scene.model).load_state_dict(state_dict, assign=assign))
    after = unsharded_state(scene)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return {"error": error, "changed": changed, "loss": scene.backward()}


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
    cpu_twins.deviate(load_with_fault, setup, **arguments, torch_does=has_changed, we_do=refused_for(1))


@all_or_nothing
@fails_on_one_rank
def test_load_failure_on_all_ranks_changes_nothing(cpu_twins: Twins) -> None:
    arguments = {"form": Form("SHARDED"), "fault": "missing", "on": range(cpu_twins.world_size)}
    cpu_twins.deviate(
        load_with_fault,
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
    cpu_twins.deviate(load_with_fault, FLAT, **arguments, torch_does=has_changed, we_do=refused_for(last))


def load_below_root(scene: Scene) -> dict[str, Any]:
    """Load at a module around units, with a fault on the second rank."""
    state_dict = {
        key.removeprefix("body."): value
        for key, value in with_other_values(state_dict_of_other_model(scene, Form())).items()
        if key.startswith("body.")
    }
    if scene.rank.rank == 1:
        state_dict[WEIGHT.removeprefix("body.")] = torch.ones(2)
    return try_to_load(scene, state_dict, scene.model.body)


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
        load_below_root, FLAT, torch_does=each(lambda value: bias in value["changed"]), we_do=is_reported
    )


def load_shards_inside_summon(scene: Scene) -> dict[str, Any]:
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
        load_shards_inside_summon,
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


def extra_state_after_failed_load(scene: Scene) -> list[str]:
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
        extra_state_after_failed_load,
        FLAT,
        torch_does=each(lambda memory: memory == ["old"]),
        we_do=each(lambda memory: memory == ["new"]),
    )


def load_with_failing_hook(scene: Scene) -> dict[str, Any]:
    """Load with a user's hook that raises on the last rank."""

    def raises(*args: Any) -> None:
        if scene.rank.rank == scene.rank.world_size - 1:
            raise KeyError("injected")

    scene.model.head.register_load_state_dict_pre_hook(raises)
    return try_to_load(scene, with_other_values(state_dict_of_other_model(scene, Form())))


@all_or_nothing
@fails_on_one_rank
def test_load_hook_that_raises_changes_nothing(twins_of: TwinsOf) -> None:
    is_reported = each(lambda value: value["error"] == "KeyError: 'injected'")
    twins_of(1).deviate(
        load_with_failing_hook,
        ORIGINALS,
        torch_does=lambda outcomes: is_reported(outcomes) and has_changed(outcomes),
        we_do=lambda outcomes: is_reported(outcomes) and is_as_before(outcomes),
    )


class CustomLoad(nn.Linear):
    """Linear layer that loads by itself: twice its weight, or a weight that does not fit."""

    fits = True

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        with torch.no_grad():
            self.bias.copy_(state_dict.pop(f"{prefix}bias"))
            weight = state_dict.pop(f"{prefix}weight")
            if self.fits:
                self.weight.data.copy_(2 * weight)
            else:
                self.weight.data = weight[:1]


def loaded_by_custom_module(scene: Scene, *, fits: bool) -> dict[str, Any]:
    """Load into a unit's inner module that loads by itself. Return the error and the full parameters."""
    state_dict = with_other_values(state_dict_of_other_model(scene, Form()))
    scene.model.head.__class__ = type("CustomLoad", (CustomLoad,), {"fits": fits})
    return try_to_load(scene, state_dict) | {"whole": scene.whole_parameters()}


@clause("distributed.fsdp.fsdp_state_dict.hooks")
@flat_or_originals
def test_modules_with_custom_load_match_torch(twins: Twins, setup: Setup) -> None:
    twins.agree(loaded_by_custom_module, setup, EXACT, fits=True)


@clause("distributed.fsdp.fsdp_state_dict.misfits")
def test_misfitting_weight_of_custom_load_raises(cpu_twins: Twins) -> None:
    for value in cpu_twins.values(loaded_by_custom_module, FLAT, fits=False):
        assert "head.weight: rank" in value["error"]
        assert "shape (1, 7), but keeps a tensor of shape (2, 7)" in value["error"]
        assert not value["changed"]


@clause("distributed.fsdp.fsdp_state_dict.misfits")
@pytest.mark.parametrize(
    ("setup", "kind"),
    [(FLAT, "ShardedTensor"), (ORIGINALS, "ShardedTensor"), (Setup(wrap="leaves", ranks="mesh"), "DTensor")],
    ids=["flat", "originals", "mesh"],
)
@pytest.mark.world_sizes(fewest=2)
def test_shards_of_another_shape_are_refused(cpu_twins: Twins, setup: Setup, kind: str) -> None:
    reported = (
        f"body.parts.0.inner.weight: rank 1 of {cpu_twins.world_size} got a {kind} of shape (2, 7) "
        "but the parameter has the shape"
    )
    arguments = {"form": Form("SHARDED"), "fault": "misshaped part", "on": [1]}
    for value in cpu_twins.values(load_with_fault, setup, **arguments):
        assert reported in value["error"]
        assert not value["changed"]


@clause("distributed.fsdp.fsdp_state_dict.misfits")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2)
def test_meta_tensor_is_not_assigned(cpu_twins: Twins, setup: Setup) -> None:
    arguments = {"form": Form(), "fault": "without values", "on": [1], "assign": True}
    for value in cpu_twins.values(load_with_fault, setup, **arguments):
        assert "rank 1 got a meta tensor of shape" in value["error"]
        assert not value["changed"]


def loaded_in_part(scene: Scene, *, form: Form, fault: str) -> dict[str, Any]:
    """Load a state dict with missing or unexpected keys, with `strict=False`."""
    state_dict = with_other_values(state_dict_of_other_model(scene, form))
    DAMAGES[fault](state_dict)
    keys = scene.model.load_state_dict(state_dict, strict=False)
    return {"keys": repr(keys), "state": unsharded_state(scene)}


@clause("distributed.fsdp.fsdp_state_dict.refused")
@pytest.mark.parametrize("fault", ["missing", "missing buffer", "unexpected"])
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@flat_or_originals
def test_non_strict_load_reports_missing_and_unexpected_keys(
    twins: Twins, kind: str, fault: str, setup: Setup
) -> None:
    missing_or_unexpected = fault.partition(" ")[0]
    for outcome in twins.agree(loaded_in_part, setup, EXACT, form=Form(kind), fault=fault):
        assert f"{missing_or_unexpected}_keys=['" in outcome.value["keys"]


@clause("distributed.fsdp.fsdp_state_dict.refused")
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("FULL", fault) for fault in ("missing", "missing buffer", "unexpected")),
        *(("FULL", fault) for fault in ("misshaped", "misshaped buffer", "a word")),
        *(("SHARDED", fault) for fault in ("missing", "missing buffer", "unexpected")),
        *(("SHARDED", fault) for fault in ("misshaped buffer", "whole")),
    ],
)
def test_faulty_state_dict_raises_like_torch(twins: Twins, kind: str, fault: str) -> None:
    """Every rank must raise torch's error. The model's state after the error is not compared.

    On a single rank, a full tensor is as good as its shard.
    """
    arguments = {"form": Form(kind), "fault": fault, "on": range(twins.world_size)}
    expected, errors = (
        [value["error"] for value in values_of(outcomes)]
        for outcomes in twins.of_both(load_with_fault, FLAT, **arguments)
    )
    assert errors == expected
    is_loaded = fault == "whole" and twins.is_alone
    assert ["Error: " in str(error) for error in errors] == [not is_loaded] * len(errors)


@clause("distributed.fsdp.fsdp_state_dict.refused")
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("two parts", "0 or 1 shard per rank but got 2 shards on rank {rank}."),
        ("without values", "meta tensor"),
    ],
)
def test_unsuitable_shards_are_refused(twins_of: TwinsOf, fault: str, text: str) -> None:
    arguments = {"form": Form("SHARDED"), "fault": fault, "on": range(2)}
    for rank, value in enumerate(twins_of(2).values(load_with_fault, FLAT, **arguments)):
        assert text.format(rank=rank) in str(value["error"])


@clause("distributed.fsdp.fsdp_state_dict.refused")
def test_shard_with_padding_is_refused_before_buffers_are_loaded(twins_of: TwinsOf) -> None:
    """The unit's last shard has one element of padding, which a state dict does not contain."""

    def is_refused(outcomes: RankOutcomes) -> bool:
        last = values_of(outcomes)[-1]
        return "Error: " in str(last["error"]) and not any(
            name.startswith("buffer") for name in last["changed"]
        )

    arguments = {"form": Form("LOCAL"), "fault": "with padding", "on": [1]}
    twins_of(2).check_both(is_refused, load_with_fault, Setup(), **arguments)


def load_from_half_world(scene: Scene, *, kind: str) -> dict[str, Any]:
    """Load a state dict that was saved over half of the ranks."""
    half = Setup("HYBRID_SHARD", ranks="groups", shards=scene.rank.world_size // 2, wrap=scene.setup.wrap)
    origin = scene.wrapped(scene.tree.build(1), half)
    for model in (origin, scene.model):
        set_form(scene.library, model, Form(kind))
    return try_to_load(scene, with_other_values(origin.state_dict()))


@clause("distributed.fsdp.fsdp_state_dict.another_world")
@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED"])
def test_state_dict_of_half_world_is_refused(twins_of: TwinsOf, kind: str) -> None:
    for rank, value in enumerate(twins_of(4).values(load_from_half_world, FLAT, kind=kind)):
        assert f"rank {rank} of 4 got" in value["error"]
        assert not value["changed"]
