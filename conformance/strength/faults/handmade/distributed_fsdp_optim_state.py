"""Faults in the state dicts of optimizers: saved states, and states to load."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from conformance.strength.faults.fault import Decorator, Make, Substitute, fault_in
from conformance.strength.faults.handmade.distributed_fsdp import FSDP, in_all_units, ranks

_SAVE = ("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict")
_LOAD = (
    "shard_full_optim_state_dict",
    "flatten_sharded_optim_state_dict",
    "scatter_full_optim_state_dict",
    "optim_state_dict_to_load",
)


def saving(thread: str) -> Decorator:
    """Return a decorator of `fault(model, saved)`, which changes the result of every method that saves."""

    def make(fault: Substitute) -> Make:
        def save(original: Any, *args: Any, **kwargs: Any) -> Any:
            saved = original(*args, **kwargs)
            if saved:
                fault(inspect.signature(original).bind(*args, **kwargs).arguments["model"], saved)
            return saved

        return in_all_units(dict.fromkeys(_SAVE, save))

    return fault_in("fully_sharded", FSDP, make, thread, part=f"{FSDP}.optim_state_dict", on_ranks=True)


def loading(thread: str) -> Decorator:
    """Return a decorator of `fault(load, model, saved)`, which replaces every method that loads.

    `load()` calls the original method and returns its result for `saved`.
    """

    def make(fault: Substitute) -> Make:
        def framed(original: Any, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(original).bind(*args, **kwargs).arguments
            saved = next(value for name, value in bound.items() if name.endswith("optim_state_dict"))
            return fault(lambda: original(*args, **kwargs), bound["model"], saved)

        return in_all_units(dict.fromkeys(_LOAD, framed))

    part = f"{FSDP}.optim_state_dict_to_load"
    return fault_in("fully_sharded", FSDP, make, thread, part=part, on_ranks=True)


def _states(saved: Any) -> Iterator[dict[str, Any]]:
    for state in saved["state"].values():
        if isinstance(state, dict):
            yield state


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


@saving("pytorch/pytorch#99214")
def numbers_not_saved(model: Any, saved: Any) -> None:
    """State tensors without the shape of their parameter are not saved."""
    for state in _states(saved):
        for name in [name for name, value in state.items() if _is_number(value)]:
            del state[name]


@saving("pytorch/pytorch#92744")
def user_states_not_saved(model: Any, saved: Any) -> None:
    """States that belong to no parameter are not saved."""
    for key in [key for key in saved["state"] if key == "mine"]:
        del saved["state"][key]


@saving("pytorch/pytorch#78599")
def local_order(model: Any, saved: Any) -> None:
    """Ranks save parameters in different orders."""
    if torch.distributed.get_rank() == 1:
        saved["state"] = dict(reversed(saved["state"].items()))


@saving("pytorch/pytorch#101343")
def one_group_for_all(model: Any, saved: Any) -> None:
    """All parameter groups have the first one's learning rate."""
    for group in saved.get("param_groups", ())[1:]:
        group["lr"] = saved["param_groups"][0]["lr"]


@saving("pytorch/pytorch#96263")
def states_kept_by_class(model: Any, saved: Any) -> None:
    """The class keeps the saved state dict."""
    type(model)._faulty_saved = saved


@saving("pytorch/pytorch#128444")
def lost_without_rank_zero(model: Any, saved: Any) -> None:
    """Ranks whose group lacks rank 0 save no tensors."""
    if 0 not in torch.distributed.get_process_group_ranks(model.process_group):
        for state in _states(saved):
            for name in [name for name, value in state.items() if isinstance(value, torch.Tensor)]:
                state[name] = None


@saving("pytorch/pytorch#110540")
def frozen_have_states(model: Any, saved: Any) -> None:
    """Frozen parameters are saved with states."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            saved["state"].setdefault(name.replace("_fsdp_wrapped_module.", ""), {})


@saving("pytorch/pytorch#128685")
def tied_saved_twice(model: Any, saved: Any) -> None:
    """A parameter with two names has two states."""
    for name in [name for name in saved["state"] if str(name).endswith("one.weight")]:
        saved["state"][name.replace("one.weight", "other.weight")] = saved["state"][name]


@loading("pytorch/pytorch#96256")
def common_numbers(load: Any, model: Any, saved: Any) -> Any:
    """Loaded parameters share one number."""
    loaded = load()
    common: dict[str, Any] = {}
    for state in _states(loaded):
        for name in [name for name, value in state.items() if _is_number(value)]:
            state[name] = common.setdefault(name, state[name])
    return loaded


@loading("pytorch/pytorch#76671")
def stateless_refused(load: Any, model: Any, saved: Any) -> Any:
    """Parameters without a state are refused."""
    names = {name for group in (saved or {}).get("param_groups", ()) for name in group["params"]}
    for name in names:
        saved["state"][name]
    return load()


@loading("pytorch/pytorch#99117")
def groups_required(load: Any, model: Any, saved: Any) -> Any:
    """A state dict without parameter groups is refused."""
    if saved:
        saved["param_groups"]
    return load()


@loading("pytorch/pytorch#107185")
def no_shard_states_sharded(load: Any, model: Any, saved: Any) -> Any:
    """A rank gets a shard of the states with NO_SHARD too."""
    loaded = load()
    if model.sharding_strategy.name == "NO_SHARD" and ranks(model) > 1:
        for state in _states(loaded):
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 1:
                    state[name] = value[: -(-len(value) // ranks(model))]
    return loaded
