"""State dicts of every type: saved, exchanged and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import DTensor

from conformance.distributed.fsdp.scenes.fsdp_training import FSDP, buffers_of, gathered_parameters, wrapped
from conformance.distributed.fsdp.scenes.scene import Scene, named, tried
from conformance.judge.library import Library, load_library


@dataclass(frozen=True)
class Form:
    """State dict type and its configuration."""

    kind: str = "FULL"  # FULL, SHARDED or LOCAL
    config: Mapping[str, bool] = field(default_factory=dict)

    def of(self, library: Library) -> tuple[Any, Any]:
        fsdp = library.distributed.fsdp
        config = getattr(fsdp, f"{self.kind.capitalize()}StateDictConfig")(**self.config)
        return fsdp.StateDictType[f"{self.kind}_STATE_DICT"], config


def set_form(library: Library, model: nn.Module, form: Form) -> None:
    library.find(FSDP).set_state_dict_type(model, *form.of(library))


def described_entry(value: Any) -> Any:
    """Return a description of a state dict's value on this rank."""
    if isinstance(value, ShardedTensor):
        metadata = value.metadata()
        parts = [
            (shard.shard_offsets, shard.shard_sizes, rank_of(shard)) for shard in metadata.shards_metadata
        ]
        local = [
            (shard.metadata.shard_offsets, shard.metadata.shard_sizes, shard.tensor.detach().cpu().clone())
            for shard in value.local_shards()
        ]
        return ["ShardedTensor", parts, metadata.size, str(metadata.tensor_properties), local]
    if isinstance(value, DTensor):
        local = value.to_local().clone()
        return ["DTensor", str(value.device_mesh), str(value.placements), value.size(), value.stride(), local]
    if isinstance(value, torch.Tensor):
        return [type(value).__name__, value.requires_grad, value.stride(), value.detach().clone()]
    return value


def rank_of(part: ShardMetadata) -> int:
    """Return the rank of a shard. The device is checked by `placed`."""
    assert part.placement is not None
    return part.placement.rank()


def save_after_backward(
    scene: Scene,
    *,
    form: Form,
    at: str = "root",
    inside: bool = False,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Save after a forward and a backward. Return the state dict, and the state of the model afterwards."""
    scene.backward()
    set_form(scene.library, scene.model, form)
    module = {"root": scene.model, "inner": scene.units[-1], "body": scene.model.body}[at]
    context = (
        scene.fsdp.summon_full_params(scene.model, writeback=False) if inside else contextlib.nullcontext()
    )
    with context:
        if inside:
            with torch.no_grad():
                for parameter in scene.model.parameters():
                    parameter.add_(1)
        state_dict = module.state_dict(**(options or {}))
        result = {
            "items": [(key, described_entry(value)) for key, value in state_dict.items()],
            "type": type(state_dict).__name__,
            "metadata": [(key, dict(value)) for key, value in state_dict._metadata.items()],
            "shared": shared(state_dict, scene.model),
        }
    return result | {
        "settings": str(scene.fsdp.get_state_dict_type(scene.model)),
        "shards": named(scene.model),
        "buffers": list(scene.model.named_buffers()),
        "loss": scene.backward(1),
    }


def shared(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, list[str]]:
    """Return, for each key, the other keys and the tensors of the model that share its memory."""
    owners: dict[int, list[str]] = {}
    for key, value in (*state_dict.items(), *model.named_parameters(), *model.named_buffers()):
        for tensor in _memory_of(value):
            owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(key)
    return {names[0]: names[1:] for names in owners.values() if names[0] in state_dict}


def _memory_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards() if shard.tensor.numel()]
    tensor = value.to_local() if isinstance(value, DTensor) else value
    return [tensor] if tensor.numel() else []


def load_from_library(
    scene: Scene, *, source: str, form: Form, at: str = "root", inside: bool = False, assign: bool = False
) -> dict[str, Any]:
    """Load a state dict of the `source` library's model into a model with other values.

    Return the state of both models.
    """
    library = load_library(source)
    origin = wrapped(scene.rank, library, scene.tree.build(), scene.setup)
    target = scene.wrapped(scene.tree.build(1))
    with torch.no_grad():
        for buffer in target.buffers():
            buffer.add_(1)
    for model, model_library in ((origin, library), (target, scene.library)):
        set_form(model_library, model, form)
        model.check_is_root()  # torch must find the root before the body is used
    state_dict = origin.body.state_dict() if at == "body" else origin.state_dict()
    loaded = target.body if at == "body" else target
    context = scene.fsdp.summon_full_params(target) if inside else contextlib.nullcontext()
    with context:
        keys = loaded.load_state_dict(state_dict, assign=assign)
    scene.model = target
    return {
        "keys": repr(keys),
        "whole": scene.whole_parameters(target),
        "expected": gathered_parameters(library, origin),
        "buffers": buffers_of(target),
        "expected buffers": buffers_of(origin),
        "loss": scene.backward(),
    }


def state_dict_of_other_model(scene: Scene, form: Form) -> dict[str, Any]:
    """Return the state dict of a model with other values."""
    origin = scene.wrapped(scene.tree.build(1))
    for model in (origin, scene.model):
        set_form(scene.library, model, form)
    return origin.state_dict()


def with_other_values(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with other values for plain tensors, which are copies."""
    return {key: value + 1 if type(value) is torch.Tensor else value for key, value in state_dict.items()}


def unsharded_state(scene: Scene) -> dict[str, torch.Tensor]:
    """Return the full parameters and the buffers."""
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in scene.model.named_buffers()}
    return scene.whole_parameters() | buffers


def load_from_other_model(scene: Scene, *, form: Form) -> dict[str, Any]:
    """Load a state dict into another model. Return the keys, the result, and whether the model has the values."""
    state_dict = state_dict_of_other_model(scene, form)
    reported = tried(lambda: repr(scene.model.load_state_dict(state_dict)))
    return {
        "keys": list(state_dict),
        "types": sorted({type(value).__name__ for value in state_dict.values()}),
        "reported": reported,
        "loaded": has_values_of_other_model(scene),
    }


def has_values_of_other_model(scene: Scene) -> bool:
    """Return whether the parameters equal those of the model in `state_dict_of_other_model`."""
    actual = scene.whole_parameters()
    expected = scene.tree.build(1).named_parameters()
    return all(torch.equal(actual[name].cpu(), parameter.detach()) for name, parameter in expected)
