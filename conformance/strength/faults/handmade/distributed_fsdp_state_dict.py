"""Faults in the model's state dicts: saved entries, loading, and failures of loading."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from conformance.strength.faults.fault import OWN, Decorator, Substitute
from conformance.strength.faults.handmade.distributed_fsdp import broken

_TYPE = ".set_state_dict_type(state_dict_type)"
_CLASS = ""
_PREFIX = "_fsdp_wrapped_module."


def saving(thread: str = OWN, about: str = _TYPE) -> Decorator:
    """Return a decorator of `fault(model, state_dict)`, which changes the outermost module's state dict."""

    def register(fault: Substitute) -> Substitute:
        @functools.wraps(fault)
        def state_dict(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            saved = original(self, *args, **kwargs)
            if kwargs.get("destination") is None:
                with torch.no_grad():
                    fault(self, saved)
            return saved

        return broken("state_dict", thread, about)(state_dict)

    return register


def loading(thread: str = OWN) -> Decorator:
    """Return a decorator of `fault(load, model, state_dict, strict)`, which replaces `load_state_dict`.

    `load(state_dict, strict)` loads correctly.
    """

    def register(fault: Substitute) -> Substitute:
        @functools.wraps(fault)
        def framed(
            original: Any, self: Any, state_dict: Any, strict: bool = True, assign: bool = False
        ) -> Any:
            def load(values: Any = state_dict, is_strict: bool = strict) -> Any:
                return original(self, values, is_strict, assign)

            return fault(load, self, state_dict, strict)

        return broken("load_state_dict", thread, _CLASS)(framed)

    return register


def _parameters(model: Any, state_dict: Any) -> list[str]:
    buffers = {name.replace(_PREFIX, "") for name, _ in model.named_buffers()}
    return [name for name in state_dict if name not in buffers]


def _unmanaged(model: Any) -> list[str]:
    """Return the names of parameters that are in no flat parameter, if there are flat parameters."""
    names = [name for name, _ in model.named_parameters()]
    has_flat = any(name.endswith("_flat_param") for name in names)
    return [name.replace(_PREFIX, "") for name in names if has_flat and "_flat_param" not in name]


@saving("pytorch/pytorch#102667")
def local_with_originals(model: Any, state_dict: Any) -> None:
    """LOCAL_STATE_DICT has original parameters too."""
    if type(model).get_state_dict_type(model).state_dict_type.name == "LOCAL_STATE_DICT":
        for name, parameter in model.named_parameters():
            state_dict.setdefault(name.replace(_PREFIX, ""), parameter.detach())


@saving("pytorch/pytorch#87815")
def inner_prefix_is_saved(model: Any, state_dict: Any) -> None:
    """Keys of inner units keep their prefix."""
    for key in [*state_dict][-1:]:
        state_dict[_PREFIX + key] = state_dict.pop(key)


@saving("pytorch/pytorch#100855")
def no_shard_sets_full(model: Any, state_dict: Any) -> None:
    """NO_SHARD sets FULL_STATE_DICT permanently."""
    if model.sharding_strategy.name == "NO_SHARD":
        kind = type(type(model).get_state_dict_type(model).state_dict_type)
        type(model).set_state_dict_type(model, kind["FULL_STATE_DICT"])


@saving("pytorch/pytorch#94109")
def rows_needed_to_save(model: Any, state_dict: Any) -> None:
    """A rank without rows of a parameter cannot save."""
    for value in state_dict.values():
        if isinstance(value, ShardedTensor) and value.size()[0]:
            value.local_shards()[0]


@saving("pytorch/pytorch#76784")
def ignored_left_out(model: Any, state_dict: Any) -> None:
    """Ignored parameters are left out."""
    for name in _unmanaged(model):
        state_dict.pop(name, None)


@saving("pytorch/pytorch#78278")
def ignored_in_half(model: Any, state_dict: Any) -> None:
    """Ignored parameters are saved in float16."""
    for name in _unmanaged(model):
        if name in state_dict:
            state_dict[name] = state_dict[name].half()


@saving("pytorch/pytorch#149100", _CLASS)
def kept_by_model(model: Any, state_dict: Any) -> None:
    """The model keeps the saved state dict."""
    model._faulty_state_dict = dict(state_dict)


@saving()
def saved_twice(model: Any, state_dict: Any) -> None:
    """Saved tensors are copied before they are freed."""
    state_dict.update(
        {key: value.clone() for key, value in state_dict.items() if type(value) is torch.Tensor}
    )


@saving()
def buffers_are_copied(model: Any, state_dict: Any) -> None:
    """Buffers are saved as copies, which training does not change."""
    for name in state_dict.keys() - set(_parameters(model, state_dict)):
        state_dict[name] = state_dict[name].clone()


@saving("pytorch/pytorch#87935")
def buffers_in_low_precision(model: Any, state_dict: Any) -> None:
    """Buffers are saved in buffer_dtype."""
    dtype = model.mixed_precision.buffer_dtype
    floating = (
        name.replace(_PREFIX, "") for name, buffer in model.named_buffers() if buffer.is_floating_point()
    )
    for name in floating if dtype is not None else ():
        state_dict[name] = state_dict[name].to(dtype)


@loading()
def own_parameters_refused(load: Any, model: Any, state_dict: Any, strict: bool) -> Any:
    """A state dict that contains the model's own parameters raises."""
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(value) in own for value in state_dict.values()):
        raise RuntimeError("size mismatch")
    return load()


@loading("pytorch/pytorch#105379")
def missing_is_a_key_error(load: Any, model: Any, state_dict: Any, strict: bool) -> Any:
    """A missing key is a KeyError although strict is False."""
    if not strict:
        for name, _ in model.module.named_buffers():
            state_dict[name.replace(_PREFIX, "")]
    return load()


@loading("pytorch/pytorch#82963")
def always_strict(load: Any, model: Any, state_dict: Any, strict: bool) -> Any:
    """strict=False is ignored."""
    return load(state_dict, True)


@loading("pytorch/pytorch#82963")
def keys_not_returned(load: Any, model: Any, state_dict: Any, strict: bool) -> Any:
    """Missing and unexpected keys are not returned."""
    load()


@loading()
def failed_loads_not_reported(load: Any, model: Any, state_dict: Any, strict: bool) -> Any:
    """Ranks do not raise if another rank fails to load."""
    try:
        return load()
    except RuntimeError as error:
        if "could not load" not in str(error):
            raise
        return torch.nn.modules.module._IncompatibleKeys([], [])
