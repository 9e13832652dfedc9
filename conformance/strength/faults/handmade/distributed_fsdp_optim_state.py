"""Faults in the state dicts of optimizers: what is saved of a state, and what is to be loaded of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute, register_fault
from conformance.strength.faults.handmade.distributed_fsdp import FSDP, OWN, in_all_units, ranks

_SAVE = ("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict")
_LOAD = (
    "shard_full_optim_state_dict",
    "flatten_sharded_optim_state_dict",
    "scatter_full_optim_state_dict",
    "optim_state_dict_to_load",
)
_TO_LOAD = ".optim_state_dict_to_load"


def saving(
    fault_id: str, says: str, thread: str = OWN, about: str = ".optim_state_dict"
) -> Callable[[Substitute], Substitute]:
    """Enter `fault(model, saved)`, which changes what any of the methods that save returns."""

    def enter(fault: Substitute) -> Substitute:
        def framed(original: Any, *args: Any, **kwargs: Any) -> Any:
            saved = original(*args, **kwargs)
            if saved:
                fault(inspect.signature(original).bind(*args, **kwargs).arguments["model"], saved)
            return saved

        _enter(fault_id, says, thread, about, dict.fromkeys(_SAVE, framed))
        return fault

    return enter


def loading(
    fault_id: str, says: str, thread: str = OWN, about: str = _TO_LOAD
) -> Callable[[Substitute], Substitute]:
    """Return a decorator of `fault(load, model, saved)`, which replaces every method that loads.

    `load()` calls the original method and returns its result for `saved`.
    """

    def enter(fault: Substitute) -> Substitute:
        def framed(original: Any, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(original).bind(*args, **kwargs).arguments
            saved = next(value for name, value in bound.items() if name.endswith("optim_state_dict"))
            return fault(lambda: original(*args, **kwargs), bound["model"], saved)

        _enter(fault_id, says, thread, about, dict.fromkeys(_LOAD, framed))
        return fault

    return enter


def _enter(fault_id: str, says: str, thread: str, about: str, faults: dict[str, Substitute]) -> None:
    name, part = f"fully_sharded.{fault_id}", f"{FSDP}{about}"
    register_fault(name, FSDP, says=says, thread=thread, part=part, on_ranks=True)(in_all_units(faults))


def _states(saved: Any) -> Iterator[dict[str, Any]]:
    for state in saved["state"].values():
        if isinstance(state, dict):
            yield state


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


@saving("numbers_not_saved", "what is no tensor in a parameter's shape is not saved", "pytorch/pytorch#99214")
def _(model: Any, saved: Any) -> None:
    for state in _states(saved):
        for name in [name for name, value in state.items() if _is_number(value)]:
            del state[name]


@saving("users_own_not_saved", "states of no parameter of a unit are not saved", "pytorch/pytorch#92744")
def _(model: Any, saved: Any) -> None:
    for key in [key for key in saved["state"] if key == "mine"]:
        del saved["state"][key]


@saving("local_order", "ranks save parameters in orders of their own", "pytorch/pytorch#78599")
def _(model: Any, saved: Any) -> None:
    if torch.distributed.get_rank() == 1:
        saved["state"] = dict(reversed(saved["state"].items()))


@saving("one_group_for_all", "all groups have the first one's numbers", "pytorch/pytorch#101343")
def _(model: Any, saved: Any) -> None:
    for group in saved.get("param_groups", ())[1:]:
        group["lr"] = saved["param_groups"][0]["lr"]


@saving("kept_by_the_class", "what was saved is kept by the class", "pytorch/pytorch#96263")
def _(model: Any, saved: Any) -> None:
    type(model)._faulty_saved = saved


@saving(
    "lost_without_rank_zero", "ranks whose group has not rank 0 save no tensors", "pytorch/pytorch#128444"
)
def _(model: Any, saved: Any) -> None:
    if 0 not in torch.distributed.get_process_group_ranks(model.process_group):
        for state in _states(saved):
            for name in [name for name, value in state.items() if isinstance(value, torch.Tensor)]:
                state[name] = None


@saving("frozen_have_states", "frozen parameters are saved with states", "pytorch/pytorch#110540")
def _(model: Any, saved: Any) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            saved["state"].setdefault(name.replace("_fsdp_wrapped_module.", ""), {})


@saving("tied_saved_twice", "a parameter with two names has two states", "pytorch/pytorch#128685")
def _(model: Any, saved: Any) -> None:
    for name in [name for name in saved["state"] if str(name).endswith("one.weight")]:
        saved["state"][name.replace("one.weight", "other.weight")] = saved["state"][name]


@loading("common_numbers", "parameters that are loaded have one number in common", "pytorch/pytorch#96256")
def _(load: Any, model: Any, saved: Any) -> Any:
    loaded = load()
    common: dict[str, Any] = {}
    for state in _states(loaded):
        for name in [name for name, value in state.items() if _is_number(value)]:
            state[name] = common.setdefault(name, state[name])
    return loaded


@loading("stateless_refused", "parameters without a state are refused", "pytorch/pytorch#76671")
def _(load: Any, model: Any, saved: Any) -> Any:
    names = {name for group in (saved or {}).get("param_groups", ()) for name in group["params"]}
    for name in names:
        saved["state"][name]
    return load()


@loading("groups_required", "a state dict without parameter groups is refused", "pytorch/pytorch#99117")
def _(load: Any, model: Any, saved: Any) -> Any:
    if saved:
        saved["param_groups"]
    return load()


@loading("no_shard_is_cut", "with NO_SHARD, too, a rank gets a part", "pytorch/pytorch#107185")
def _(load: Any, model: Any, saved: Any) -> Any:
    loaded = load()
    if model.sharding_strategy.name == "NO_SHARD" and ranks(model) > 1:
        for state in _states(loaded):
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 1:
                    state[name] = value[: -(-len(value) // ranks(model))]
    return loaded
