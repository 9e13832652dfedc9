"""Faults in the model's state dicts: what is in them, what is loaded of them, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from conformance.strength.faults.fault import Substitute
from conformance.strength.faults.handmade.distributed_fsdp import OWN, broken

_TYPE = ".set_state_dict_type(state_dict_type)"
_CLASS = ""
_PREFIX = "_fsdp_wrapped_module."


def saving(
    fault_id: str, says: str, thread: str = OWN, about: str = _TYPE
) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """Enter `fault(model, state_dict)`, which changes what the outermost module's `state_dict` returns."""

    def enter(fault: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def state_dict(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            saved = original(self, *args, **kwargs)
            if kwargs.get("destination") is None:
                with torch.no_grad():
                    fault(self, saved)
            return saved

        broken(fault_id, "state_dict", says, thread, about)(state_dict)
        return fault

    return enter


def loading(
    fault_id: str, says: str, thread: str = OWN, about: str = _CLASS
) -> Callable[[Substitute], Substitute]:
    """Enter `fault(load, model, state_dict, strict)`, called in the place of `load_state_dict`.

    `load(state_dict, strict)` loads as it should be.
    """

    def enter(fault: Substitute) -> Substitute:
        def framed(
            original: Any, self: Any, state_dict: Any, strict: bool = True, assign: bool = False
        ) -> Any:
            def load(values: Any = state_dict, is_strict: bool = strict) -> Any:
                return original(self, values, is_strict, assign)

            return fault(load, self, state_dict, strict)

        broken(fault_id, "load_state_dict", says, thread, about)(framed)
        return fault

    return enter


def _parameters(model: Any, state_dict: Any) -> list[str]:
    buffers = {name.replace(_PREFIX, "") for name, _ in model.named_buffers()}
    return [name for name in state_dict if name not in buffers]


def _unmanaged(model: Any) -> list[str]:
    """Return the names of parameters that are in no flat parameter, if there are flat parameters."""
    names = [name for name, _ in model.named_parameters()]
    has_flat = any(name.endswith("_flat_param") for name in names)
    return [name.replace(_PREFIX, "") for name in names if has_flat and "_flat_param" not in name]


@saving("local_with_originals", "LOCAL_STATE_DICT has original parameters too", "pytorch/pytorch#102667")
def _(model: Any, state_dict: Any) -> None:
    if type(model).get_state_dict_type(model).state_dict_type.name == "LOCAL_STATE_DICT":
        for name, parameter in model.named_parameters():
            state_dict.setdefault(name.replace(_PREFIX, ""), parameter.detach())


@saving("inner_prefix_is_saved", "keys of inner units keep their prefix", "pytorch/pytorch#87815")
def _(model: Any, state_dict: Any) -> None:
    for key in [*state_dict][-1:]:
        state_dict[_PREFIX + key] = state_dict.pop(key)


@saving("no_shard_sets_full", "NO_SHARD sets FULL_STATE_DICT for good", "pytorch/pytorch#100855")
def _(model: Any, state_dict: Any) -> None:
    if model.sharding_strategy.name == "NO_SHARD":
        kind = type(type(model).get_state_dict_type(model).state_dict_type)
        type(model).set_state_dict_type(model, kind["FULL_STATE_DICT"])


@saving("no_rows_no_state_dict", "a rank without rows of a parameter cannot save", "pytorch/pytorch#94109")
def _(model: Any, state_dict: Any) -> None:
    for value in state_dict.values():
        if isinstance(value, ShardedTensor) and value.size()[0]:
            value.local_shards()[0]


@saving("ignored_left_out", "what is ignored is left out", "pytorch/pytorch#76784")
def _(model: Any, state_dict: Any) -> None:
    for name in _unmanaged(model):
        state_dict.pop(name, None)


@saving("ignored_in_half", "what is ignored is saved in float16", "pytorch/pytorch#78278")
def _(model: Any, state_dict: Any) -> None:
    for name in _unmanaged(model):
        if name in state_dict:
            state_dict[name] = state_dict[name].half()


@saving("held_by_the_model", "the model keeps what was saved", "pytorch/pytorch#149100", _CLASS)
def _(model: Any, state_dict: Any) -> None:
    model._faulty_state_dict = dict(state_dict)


@saving("saved_twice", "what was saved is copied while it is still held")
def _(model: Any, state_dict: Any) -> None:
    state_dict.update(
        {key: value.clone() for key, value in state_dict.items() if type(value) is torch.Tensor}
    )


@saving("buffers_are_copied", "buffers are saved as copies, which what trains on no longer changes")
def _(model: Any, state_dict: Any) -> None:
    for name in state_dict.keys() - set(_parameters(model, state_dict)):
        state_dict[name] = state_dict[name].clone()


@saving("buffers_in_low_precision", "buffers are saved in buffer_dtype", "pytorch/pytorch#87935")
def _(model: Any, state_dict: Any) -> None:
    dtype = model.mixed_precision.buffer_dtype
    floating = (
        name.replace(_PREFIX, "") for name, buffer in model.named_buffers() if buffer.is_floating_point()
    )
    for name in floating if dtype is not None else ():
        state_dict[name] = state_dict[name].to(dtype)


@loading("missing_is_a_key_error", "with strict=False a missing key is a KeyError", "pytorch/pytorch#105379")
def _(load: Any, model: Any, state_dict: Any, strict: bool) -> Any:
    if not strict:
        for name, _ in model.module.named_buffers():
            state_dict[name.replace(_PREFIX, "")]
    return load()


@loading("always_strict", "strict=False is not listened to", "pytorch/pytorch#82963")
def _(load: Any, model: Any, state_dict: Any, strict: bool) -> Any:
    return load(state_dict, True)


@loading("says_nothing_of_keys", "what is missing or unexpected is not returned", "pytorch/pytorch#82963")
def _(load: Any, model: Any, state_dict: Any, strict: bool) -> Any:
    load()


@loading("others_are_not_told", "ranks are not told that another one could not load")
def _(load: Any, model: Any, state_dict: Any, strict: bool) -> Any:
    try:
        return load()
    except RuntimeError as error:
        if "could not load" not in str(error):
            raise
        return torch.nn.modules.module._IncompatibleKeys([], [])
