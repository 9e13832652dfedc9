"""Cases of optimizer state dicts that torch gets wrong. Each returns the values that a rank reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from conformance.distributed.fsdp.lab import Lab, tried
from conformance.distributed.fsdp.optim_state_cases import (
    Optimized,
    StateDictMethod,
    by_name,
    copied,
    plain,
    step,
)
from conformance.distributed.fsdp.state_dict_memory_cases import Received

_OLDER_FULL, _FULL = StateDictMethod("full"), StateDictMethod("FULL", offloads=False)


def train_unwrapped(lab: Lab, optimized: Optimized) -> dict[str, Any]:
    """Return the optimizer's state dict for the same model without wrapping."""
    model = lab.tree.build()
    return copied(by_name(model, optimized.stepped(model)))


def saved(lab: Lab, optimized: Optimized) -> Any:
    return plain(_OLDER_FULL.save(lab, optimized.stepped(lab.model)))["state"]


def there_and_back_as_dtensors(lab: Lab) -> dict[str, Any]:
    """Return the types of states that are saved as DTensors, and whether a fresh optimizer loads the same states."""
    fsdp, optimized = lab.api, Optimized("momentum")
    optimizer, fresh = optimized.stepped(lab.model), optimized.optimizer(lab.model)
    before = copied(optimizer.state_dict())
    with lab.fsdp.state_dict_type(
        lab.model,
        fsdp.StateDictType.SHARDED_STATE_DICT,
        fsdp.ShardedStateDictConfig(_use_dtensor=True),
        fsdp.ShardedOptimStateDictConfig(_use_dtensor=True),
    ):
        saved = lab.fsdp.optim_state_dict(lab.model, optimizer)
        types = {type(state["momentum_buffer"]).__name__ for state in saved["state"].values()}
        fresh.load_state_dict(lab.fsdp.optim_state_dict_to_load(lab.model, fresh, saved))
    return {"types": types, "is_kept": _are_equal(before["state"], fresh.state_dict()["state"])}


def counts_after_a_step(lab: Lab) -> list[float]:
    """Return `step` of each parameter after a step, if all loaded states share one tensor for it."""
    saved = train_unwrapped(lab, Optimized(steps=2))
    common = torch.tensor(2.0)
    for state in saved["state"].values():
        state["step"] = common
    optimizer = Optimized().optimizer(lab.model)
    optimizer.load_state_dict(_OLDER_FULL.load(lab, optimizer, saved))
    step(lab.model, optimizer)
    return [float(state["step"]) for state in optimizer.state.values()]


def saved_numbers_are_separate(lab: Lab) -> bool:
    saved = _OLDER_FULL.save(lab, Optimized().stepped(lab.model))
    steps = [state["step"] for state in saved["state"].values()]
    return len({number.data_ptr() for number in steps}) == len(steps)


def given_stays(lab: Lab) -> bool:
    """Return whether a loaded state dict is unchanged after the optimizer has stepped."""
    saved = train_unwrapped(lab, Optimized())
    before = copied(saved)
    optimizer = Optimized().optimizer(lab.model)
    optimizer.load_state_dict(_OLDER_FULL.load(lab, optimizer, saved))
    step(lab.model, optimizer)
    return _are_equal(before, saved)


def _are_equal(first: Any, second: Any) -> bool:
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def loaded_without_the_first(lab: Lab) -> Any:
    """Return the names that are saved after a load in which the first parameter of a unit had no state."""
    optimized = Optimized("momentum")
    state_dict = train_unwrapped(lab, optimized)
    del state_dict["state"]["head.weight"]
    optimizer = optimized.optimizer(lab.model)
    optimizer.load_state_dict(_OLDER_FULL.load(lab, optimizer, state_dict))
    return sorted(_OLDER_FULL.save(lab, optimizer)["state"])


def misshaped(lab: Lab) -> Any:
    optimized = Optimized("momentum")
    saved = train_unwrapped(lab, optimized)
    saved["state"]["head.weight"]["momentum_buffer"] = torch.zeros(40)
    return tried(lambda: bool(_OLDER_FULL.load(lab, optimized.optimizer(lab.model), saved)["state"]))


def groups_of_two_kinds(lab: Lab) -> Any:
    """Save parameters of one unit in two groups, of which one keeps an additional tensor."""
    parameters = list(lab.model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "amsgrad": True}]
    optimizer = torch.optim.Adam(groups, lr=0.05)
    step(lab.model, optimizer)
    return tried(lambda: _named_tensors(_OLDER_FULL.save(lab, optimizer)))


def _named_tensors(saved: dict[str, Any]) -> dict[str, list[str]]:
    return {name: sorted(state) for name, state in sorted(saved["state"].items())}


def of_another_shape(lab: Lab) -> Any:
    """Save an optimizer that keeps a tensor of another shape than its parameter, on the second rank only."""
    optimizer = Optimized("momentum").stepped(lab.model)
    if lab.rank.rank == 1:
        next(iter(optimizer.state.values()))["extra"] = torch.zeros(3)
    return tried(lambda: sorted(_OLDER_FULL.save(lab, optimizer)))


def in_a_list(lab: Lab) -> Any:
    """Save and load a list of tensors for each parameter."""
    optimizer, fresh = Optimized("momentum").stepped(lab.model), Optimized("momentum").optimizer(lab.model)
    state_dict = train_unwrapped(lab, Optimized("momentum"))
    for parameter, state in optimizer.state.items():
        state["history"] = [torch.zeros_like(parameter)]
    for state in state_dict["state"].values():
        state["history"] = [state["momentum_buffer"].clone()]
    return {
        "saving": tried(lambda: sorted(_OLDER_FULL.save(lab, optimizer))),
        "loading": tried(lambda: sorted(_OLDER_FULL.load(lab, fresh, state_dict))),
    }


def numbers_in_a_list(lab: Lab) -> Any:
    """Return the lists in a saved and in a loaded state, after the optimizers changed their own lists."""
    optimizer, fresh = Optimized("momentum").stepped(lab.model), Optimized("momentum").optimizer(lab.model)
    for state in optimizer.state.values():
        state["losses"] = [0.5, torch.tensor(0.25)]

    def saved_and_loaded() -> Any:
        saved = _OLDER_FULL.save(lab, optimizer)
        fresh.load_state_dict(_OLDER_FULL.load(lab, fresh, saved))
        for state in (*optimizer.state.values(), *fresh.state.values()):
            state["losses"].append(1.0)
            state["losses"][1].add_(1)
        return [
            [list(map(float, state["losses"])) for state in states]
            for states in (saved["state"].values(), fresh.state.values())
        ]

    return tried(saved_and_loaded)


def transposed(lab: Lab) -> Any:
    """Return whether the state of a transposed parameter is the same after it was saved and loaded."""
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    module = nn.Module()
    module.register_parameter("weight", weight)
    model = lab.wrap(module, use_orig_params=lab.setup.uses_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    step(model, optimizer)
    saved = lab.fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    loaded = lab.fsdp.shard_full_optim_state_dict(saved, model, optim=optimizer)
    states = optimizer.state_dict()["state"]
    return [
        torch.equal(states[key]["momentum_buffer"], loaded["state"][key]["momentum_buffer"]) for key in states
    ]


def in_a_group(lab: Lab, of: int) -> Any:
    """Save and load in groups of `of` ranks that each have a model."""
    ranks = [list(range(first, first + of)) for first in range(0, lab.rank.world_size, of)]
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    model = lab.wrap(lab.plain, process_group=group, use_orig_params=True)
    optimizer = Optimized("momentum").stepped(model)
    saved = lab.fsdp.full_optim_state_dict(model, optimizer, group=group)
    states = optimizer.state_dict()["state"]
    scattered = lab.fsdp.scatter_full_optim_state_dict(saved, model, optim=optimizer, group=group)["state"]
    lab.model, way = model, StateDictMethod("FULL", rank0_only=True, offloads=False)
    with way.set_on(lab):
        again = lab.fsdp.optim_state_dict(model, optimizer, group=group)
        loaded = lab.fsdp.optim_state_dict_to_load(model, optimizer, again, group=group)["state"]
    return {
        "saved": sorted(saved.get("state", ())),
        "again": sorted(again.get("state", ())),
        "is_kept": [
            _are_equal(states[key], scattered[key]) and _are_equal(states[key], loaded[key]) for key in states
        ],
    }


def one_rank_refuses(lab: Lab, fault: str) -> Any:
    """Load a state that does not fit on the second rank."""
    state_dict = copied(_FULL.save(lab, Optimized(steps=2).stepped(lab.model)))
    optimizer = Optimized(steps=1).stepped(lab.model)
    if lab.rank.rank == 1:
        if fault == "misshaped":
            state_dict["state"]["head.weight"]["exp_avg"] = torch.zeros(3, 3)
        elif fault == "unknown":
            state_dict["param_groups"][0]["params"].append("unknown")
        else:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    return _refused(lab, optimizer, lambda: _FULL.load(lab, optimizer, state_dict, load_directly=True))


def parts_that_differ(lab: Lab) -> Any:
    """Load sharded rows of a state that the second rank does not have."""
    optimizer, way = Optimized("momentum").stepped(lab.model), StateDictMethod("SHARDED")
    state_dict = way.save(lab, optimizer)
    if lab.rank.rank == 1:
        del state_dict["state"]["head.weight"]
    return _refused(lab, optimizer, lambda: way.load(lab, optimizer, state_dict, load_directly=True))


def _refused(lab: Lab, optimizer: torch.optim.Optimizer, load: Callable[[], Any]) -> dict[str, Any]:
    before = copied([optimizer.state_dict(), list(lab.model.parameters())])
    raised = tried(lambda: load() and None)
    after = [optimizer.state_dict(), list(lab.model.parameters())]
    return {"raised": raised, "is_as_before": _are_equal(before, after)}


# -- amount of communication


def received(lab: Lab, way: StateDictMethod) -> dict[str, int]:
    """Return the bytes that this rank receives, and the bytes of full states, of single rows and of its shard."""
    optimizer = Optimized().stepped(lab.model)
    with Received() as saving:
        saved = way.save(lab, optimizer)
    with Received() as loading:
        way.load(lab, optimizer, saved)
    wholes = [tensor for tensor in tree_leaves(train_unwrapped(lab, Optimized())["state"]) if tensor.dim()]
    return {
        "saving": saving.bytes,
        "loading": loading.bytes,
        "whole": sum(tensor.nbytes for tensor in wholes),
        "rows": sum(tensor[0].nbytes for tensor in wholes),
        "shard": sum(parameter.nbytes for parameter in lab.model.parameters()),
    }
