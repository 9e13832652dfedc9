"""Cases of state dicts of wrapped models: their contents, loading them elsewhere, and loading dicts that do not fit."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import DTensor

from conformance.distributed.fsdp.fsdp_cases import FSDP, Setup, clean, gathered_parameters, wrapped
from conformance.distributed.fsdp.lab import Lab, named, tried
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


def described(value: Any) -> Any:
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


# -- saving


def saved(
    lab: Lab, *, form: Form, at: str = "root", inside: bool = False, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Save after a forward and a backward. Return the state dict, and the state of the model afterwards."""
    lab.backward()
    set_form(lab.library, lab.model, form)
    module = {"root": lab.model, "inner": lab.units[-1], "body": lab.model.body}[at]
    context = lab.fsdp.summon_full_params(lab.model, writeback=False) if inside else contextlib.nullcontext()
    with context:
        if inside:
            with torch.no_grad():
                for parameter in lab.model.parameters():
                    parameter.add_(1)
        state_dict = module.state_dict(**(options or {}))
        result = {
            "items": [(key, described(value)) for key, value in state_dict.items()],
            "type": type(state_dict).__name__,
            "metadata": [(key, dict(value)) for key, value in state_dict._metadata.items()],
            "shared": shared(state_dict, lab.model),
        }
    return result | {
        "settings": str(lab.fsdp.get_state_dict_type(lab.model)),
        "shards": named(lab.model),
        "buffers": list(lab.model.named_buffers()),
        "loss": lab.backward(1),
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


# -- loading a saved state dict


def exchanged(
    lab: Lab, *, source: str, form: Form, at: str = "root", inside: bool = False, assign: bool = False
) -> dict[str, Any]:
    """Load a state dict of the `source` library's model into a model with other values.

    Return the state of both models.
    """
    library = load_library(source)
    origin = wrapped(lab.rank, library, lab.tree.build(), lab.setup)
    target = lab.wrapped(lab.tree.build(1))
    with torch.no_grad():
        for buffer in target.buffers():
            buffer.add_(1)
    for model, model_library in ((origin, library), (target, lab.library)):
        set_form(model_library, model, form)
        model.check_is_root()  # torch must find the root before the body is used
    state_dict = origin.body.state_dict() if at == "body" else origin.state_dict()
    loaded = target.body if at == "body" else target
    context = lab.fsdp.summon_full_params(target) if inside else contextlib.nullcontext()
    with context:
        keys = loaded.load_state_dict(state_dict, assign=assign)
    lab.model = target
    return {
        "keys": repr(keys),
        "whole": gathered_parameters(lab.library, target),
        "expected": gathered_parameters(library, origin),
        "buffers": _copied_buffers(target),
        "expected buffers": _copied_buffers(origin),
        "loss": lab.backward(),
    }


def _copied_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {clean(name): buffer.clone() for name, buffer in model.named_buffers()}


def loaded_in_part(lab: Lab, *, form: Form, fault: str) -> dict[str, Any]:
    """Load a state dict with missing or unexpected keys, with `strict=False`."""
    state_dict = moved(state_dict_of(lab, form))
    FAULTS[fault](state_dict)
    keys = lab.model.load_state_dict(state_dict, strict=False)
    return {"keys": repr(keys), "state": unsharded_state(lab)}


def state_dict_of(lab: Lab, form: Form) -> dict[str, Any]:
    """Return the state dict of a model with other values."""
    origin = lab.wrapped(lab.tree.build(1))
    for model in (origin, lab.model):
        set_form(lab.library, model, form)
    return origin.state_dict()


def with_a_late_parameter(lab: Lab, *, form: Form, of: str) -> dict[str, Any]:
    """Save and load a parameter that was added inside a unit after wrapping.

    The unit around the module manages the parameter.
    """
    kind = {"use_orig_params": lab.setup.uses_orig_params}
    inner = lab.plain.body = lab.wrap(lab.plain.body, **kind)
    inner.module.get_submodule(of).late = nn.Parameter(torch.ones(4))
    lab.model = lab.wrap(lab.plain, **kind)
    set_form(lab.library, lab.model, form)
    state_dict = moved(copy.deepcopy(lab.model.state_dict()))
    with torch.no_grad():
        for parameter in lab.model.parameters():
            parameter.zero_()
    keys = lab.model.load_state_dict(state_dict)
    whole = unsharded_state(lab)
    return {
        "names": sorted(state_dict),
        "keys": repr(keys),
        "state": {name: whole[name] for name in sorted(whole)},
    }


def moved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with other values for plain tensors, which are copies."""
    return {key: value + 1 if type(value) is torch.Tensor else value for key, value in state_dict.items()}


def unsharded_state(lab: Lab) -> dict[str, torch.Tensor]:
    """Return the full parameters and the buffers."""
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in lab.model.named_buffers()}
    return gathered_parameters(lab.library, lab.model) | buffers


# -- loading a state dict that does not fit

Damage = Callable[[dict[str, Any]], Any]
_WEIGHT, _BUFFER = "body.parts.0.inner.weight", "body.parts.1.parts.1.inner.running_mean"


def _split_into_rows(state_dict: dict[str, Any]) -> None:
    """Split the local shards of a ShardedTensor into one shard for each row."""
    sharded = state_dict[_WEIGHT]
    if isinstance(sharded, ShardedTensor):
        parts = [
            Shard.from_tensor_and_offsets(row, [shard.metadata.shard_offsets[0] + number, 0], dist.get_rank())
            for shard in sharded.local_shards()
            for number, row in enumerate(shard.tensor.split(1))
        ]
        state_dict[_WEIGHT] = ShardedTensor._init_from_local_shards(parts, sharded.size())


def _drop_values(state_dict: dict[str, Any]) -> None:
    """Put a tensor on the meta device. `ShardedTensor.to("meta")` asks for an accelerator from torch 2.14 on."""
    value = state_dict[_WEIGHT]
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            shard.tensor = shard.tensor.to("meta")
    else:
        state_dict[_WEIGHT] = value.to("meta")


FAULTS: dict[str, Damage] = {
    "missing": lambda state_dict: (state_dict.pop(_WEIGHT), state_dict.pop("head.bias")),
    "missing buffer": lambda state_dict: state_dict.pop(_BUFFER),
    "unexpected": lambda state_dict: state_dict.update(
        {"head.more": torch.ones(1), "body.parts.0.more": torch.ones(1)}
    ),
    "misshaped": lambda state_dict: state_dict.update({_WEIGHT: torch.ones(2), "head.bias": torch.ones(7)}),
    "misshaped buffer": lambda state_dict: state_dict.update({_BUFFER: torch.ones(2)}),
    "a word": lambda state_dict: state_dict.update({_WEIGHT: "word"}),
    "whole": lambda state_dict: state_dict.update({_WEIGHT: torch.ones(4, 3)}),
    "without values": _drop_values,
    "two parts": _split_into_rows,
    "misshaped part": lambda state_dict: state_dict.update({_WEIGHT: state_dict["head.weight"]}),
}


def failed(lab: Lab, *, form: Form, fault: str, on: Sequence[int], assign: bool = False) -> dict[str, Any]:
    """Load a state dict that has a fault on some ranks. Return the error, the changed values and the next loss."""
    state_dict = moved(state_dict_of(lab, form))
    if lab.rank.rank in on:
        FAULTS[fault](state_dict)
    return tried_to_load(lab, state_dict, assign=assign)


def tried_to_load(
    lab: Lab, state_dict: dict[str, Any], module: nn.Module | None = None, assign: bool = False
) -> dict[str, Any]:
    before = unsharded_state(lab)
    error = tried(lambda: (module or lab.model).load_state_dict(state_dict, assign=assign))
    after = unsharded_state(lab)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return {"error": error, "changed": changed, "loss": lab.backward()}


def failed_below(lab: Lab) -> dict[str, Any]:
    """Load at a module around units, with a fault on the second rank."""
    state_dict = {
        key.removeprefix("body."): value
        for key, value in moved(state_dict_of(lab, Form())).items()
        if key.startswith("body.")
    }
    if lab.rank.rank == 1:
        state_dict[_WEIGHT.removeprefix("body.")] = torch.ones(2)
    return tried_to_load(lab, state_dict, lab.model.body)


def of_another_world(lab: Lab, *, kind: str) -> dict[str, Any]:
    """Load a state dict that was saved over half of the ranks."""
    half = Setup("HYBRID_SHARD", ranks="groups", shards=lab.rank.world_size // 2, wrap=lab.setup.wrap)
    origin = lab.wrapped(lab.tree.build(1), half)
    for model in (origin, lab.model):
        set_form(lab.library, model, Form(kind))
    return tried_to_load(lab, moved(origin.state_dict()))


def loads_its_own(lab: Lab, *, form: Form) -> dict[str, Any]:
    """Load a state dict into another model. Return the keys, the result, and whether the model has the values."""
    state_dict = state_dict_of(lab, form)
    reported = tried(lambda: repr(lab.model.load_state_dict(state_dict)))
    return {
        "keys": list(state_dict),
        "types": sorted({type(value).__name__ for value in state_dict.values()}),
        "reported": reported,
        "loaded": _has_values_of_other(lab),
    }


def loads_by_swapping(lab: Lab, *, form: Form) -> dict[str, Any]:
    """Load while modules swap tensors instead of copying into them, and then train."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        reported = loads_its_own(lab, form=form)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return reported | {"loss": lab.backward(), "shards": named(lab.model)}


class OnDemand:
    """Object with a tensor's shape and dtype. A function of torch that is called with it gets the actual tensor."""

    is_meta = True

    def __init__(self, read: Callable[[], torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> None:
        self.read, self.shape, self.dtype = read, shape, dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *(argument.read() if isinstance(argument, OnDemand) else argument for argument in args),
            **(kwargs or {}),
        )


def on_demand(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {key: OnDemand(value.clone, value.shape, value.dtype) for key, value in state_dict.items()}


def loads_on_demand(lab: Lab, *, fault: str) -> dict[str, Any]:
    """Load a full dict of objects that are not tensors. Return the result and whether the model has the values."""
    state_dict = state_dict_of(lab, Form("FULL"))
    if fault:
        FAULTS[fault](state_dict)
    reported = tried(lambda: repr(lab.model.load_state_dict(on_demand(state_dict))))
    return {
        "reported": reported,
        "loaded": _has_values_of_other(lab),
        "loss": None if fault else lab.backward(),
    }


def assigned(lab: Lab, *, form: Form) -> dict[str, Any]:
    """Load with `assign` into a wrapped model, and then train. Return whether the model has the values."""
    lab.model.load_state_dict(state_dict_of(lab, form), assign=True)
    return {"loaded": _has_values_of_other(lab), "loss": lab.backward()}


def built_on_meta(lab: Lab, *, form: Form, assign: bool) -> dict[str, Any]:
    """Load into a model that was wrapped on the meta device. Return what was loaded, and whether torch warned.

    The unit has initialised its modules, except for the one that it ignores.
    """
    origin = lab.wrapped(lab.tree.build(1))
    target = _wrapped_on_meta(lab)
    for model in (origin, target):
        set_form(lab.library, model, form)
    state_dict, expected = origin.state_dict(), gathered_parameters(lab.library, origin)
    ignored = [name for name in expected if name.startswith("body.parts.0.")]
    state_dict |= {name: expected[name] for name in ignored}
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        target.load_state_dict(state_dict, assign=assign)
    actual = gathered_parameters(lab.library, target)
    loaded = {
        name for name in actual if not actual[name].is_meta and torch.equal(actual[name], expected[name])
    }
    return {
        "ignored": loaded.issuperset(ignored),
        "managed": loaded.issuperset(actual.keys() - set(ignored)),
        "warned": any("which is a no-op" in str(warning.message) for warning in reported),
    }


def _wrapped_on_meta(lab: Lab) -> nn.Module:
    plain, device = lab.tree.build().to("meta"), lab.rank.device
    return lab.fsdp(
        plain,
        device_id=device,
        use_orig_params=lab.setup.uses_orig_params,
        ignored_modules=[plain.body.parts[0]],
        param_init_fn=lambda module: module.to_empty(device=device, recurse=False),
    )


def _has_values_of_other(lab: Lab) -> bool:
    """Return whether the parameters equal those of the model in `state_dict_of`."""
    actual = gathered_parameters(lab.library, lab.model)
    expected = lab.tree.build(1).named_parameters()
    return all(torch.equal(actual[name].cpu(), parameter.detach()) for name, parameter in expected)


# -- another number of ranks


def written(lab: Lab, *, path: str, form: Form) -> list[str]:
    """Save a model's state with torch.distributed.checkpoint. Return its keys."""
    set_form(lab.library, lab.model, form)
    state_dict = lab.model.state_dict()
    torch.distributed.checkpoint.save(state_dict, checkpoint_id=path)
    return list(state_dict)


def read(lab: Lab, *, path: str, form: Form) -> dict[str, Any]:
    """Load a state with torch.distributed.checkpoint into a model with other values. Return the full parameters."""
    target = lab.wrapped(lab.tree.build(1))
    set_form(lab.library, target, form)
    state_dict = target.state_dict()
    torch.distributed.checkpoint.load(state_dict, checkpoint_id=path)
    target.load_state_dict(state_dict)
    return gathered_parameters(lab.library, target)


# -- settings


def settings(lab: Lab) -> dict[str, Any]:
    """Return the settings before and after changes, and the errors of settings that are refused."""
    fsdp, types = lab.fsdp, lab.library.distributed.fsdp.StateDictType
    configs = lab.library.distributed.fsdp
    reported: dict[str, Any] = {"at first": str(fsdp.get_state_dict_type(lab.model))}
    for kind in types:
        reported[f"before {kind}"] = str(fsdp.set_state_dict_type(lab.model, kind))
        reported[f"after {kind}"] = _set_now(lab)
    rank0_configs = (
        configs.FullStateDictConfig(rank0_only=True),
        configs.FullOptimStateDictConfig(rank0_only=True),
    )
    with fsdp.state_dict_type(lab.model, types.FULL_STATE_DICT, *rank0_configs):
        inside = fsdp.get_state_dict_type(lab.model)
        reported["inside"] = [str(inside), inside.state_dict_config is rank0_configs[0]]
    reported["outside"] = _set_now(lab)
    refused: list[tuple[Any, ...]] = [
        (types.FULL_STATE_DICT, configs.ShardedStateDictConfig()),
        (types.FULL_STATE_DICT, None, configs.LocalOptimStateDictConfig()),
        ("FULL_STATE_DICT",),
    ]
    reported["refused"] = [
        tried(functools.partial(fsdp.set_state_dict_type, lab.model, *arguments)) for arguments in refused
    ]
    fsdp.set_state_dict_type(lab.model, types.FULL_STATE_DICT)
    reported["of no unit"] = [
        str(fsdp.get_state_dict_type(nn.Linear(1, 1))),
        str(fsdp.set_state_dict_type(nn.Linear(1, 1), types.FULL_STATE_DICT)),
    ]
    fsdp.set_state_dict_type(lab.units[-1], types.SHARDED_STATE_DICT)
    reported["set apart"] = [
        tried(lambda: fsdp.get_state_dict_type(lab.model)),
        tried(lambda: fsdp.set_state_dict_type(lab.model, types.FULL_STATE_DICT)),
    ]
    return reported


def _set_now(lab: Lab) -> str:
    try:
        return str(lab.fsdp.get_state_dict_type(lab.model))
    except RuntimeError as error:
        return (
            f"RuntimeError: {' '.join(error.args)}"  # torch 2.11 passes its sentences as separate arguments
        )


def after_an_error_inside(lab: Lab) -> str:
    """Return the type that is set after an exception inside the context."""
    types = lab.library.distributed.fsdp.StateDictType
    with contextlib.suppress(KeyError), lab.fsdp.state_dict_type(lab.model, types.SHARDED_STATE_DICT):
        raise KeyError("injected")
    return lab.fsdp.get_state_dict_type(lab.model).state_dict_type.name


def set_on_no_unit(lab: Lab) -> Any:
    """Enter the context for a module without units. Return the result or the error."""
    types = lab.library.distributed.fsdp.StateDictType

    def enter() -> str:
        with lab.fsdp.state_dict_type(nn.Linear(1, 1), types.SHARDED_STATE_DICT):
            return "entered"

    return tried(enter)


def saved_while_unsharded(lab: Lab, *, form: Form) -> Any:
    """Return the keys of a state dict inside summon_full_params, or the error."""
    set_form(lab.library, lab.model, form)
    with lab.fsdp.summon_full_params(lab.model, writeback=False):
        return tried(lambda: list(lab.model.state_dict()))
