"""Optimizers whose states are saved and loaded, on ranks and unsharded."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_only

from conformance.distributed.fsdp.scenes.module_trees import ModuleTree
from conformance.distributed.fsdp.scenes.scene import TREE, Scene
from conformance.judge.outcome import TensorState
from conformance.judge.tolerances import ONE_STEP

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": functools.partial(torch.optim.Adam, lr=0.05),
    "amsgrad": functools.partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.5),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.05, centered=True),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.05),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.05),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.05),
}


@dataclass(frozen=True)
class Optimized:
    """Optimizer type, its number of parameter groups, and the number of steps that it has taken."""

    kind: str = "adam"
    groups: int = 1  # parameter groups, each with half the previous learning rate
    steps: int = 2

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        of_groups = [parameters[number :: self.groups] for number in range(self.groups)]
        groups = [
            {"params": group_parameters, "lr": 0.05 * 0.5**number}
            for number, group_parameters in enumerate(of_groups)
            if group_parameters
        ]
        return OPTIMIZERS[self.kind](groups)

    def stepped(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = self.optimizer(model)
        for _ in range(self.steps):
            step(model, optimizer)
        return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step with a gradient that is computed element by element, so that no order of additions changes the result."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.numel():
            parameter.grad = parameter.detach() * 0.5 + parameter.detach().sign()
    optimizer.step()
    optimizer.zero_grad()


def create_states(optimizer: torch.optim.Optimizer) -> None:
    """Take a step that changes no weight, because a checkpoint is loaded into states that exist."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def described(value: Any) -> Any:
    """Return a value with sorted keys, in which this rank's shards and their layout replace the sharded tensors."""
    if isinstance(value, ShardedTensor):
        return {
            "metadata": repr(value.metadata()),
            # The devices are checked by `state_placements`.
            "parts": [shard.tensor.cpu() for shard in value.local_shards()],
            "ranks": dist.get_process_group_ranks(value._process_group),
        }
    if isinstance(value, DTensor):
        return {"placements": repr(value.placements), "shape": tuple(value.shape), "part": value.to_local()}
    if isinstance(value, Mapping):
        return {key: described(value[key]) for key in sorted(value, key=repr)}
    return [described(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class StateDictMethod:
    """Method of saving and loading a state dict: one of the older methods, or the state dict type that is set."""

    # Older methods are full, scattered and sharded. State dict types are FULL, SHARDED and LOCAL.
    name: str
    rank0_only: bool = False
    offloads: bool = True

    def save(self, scene: Scene, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self.name == "sharded":
            return scene.fsdp.sharded_optim_state_dict(scene.model, optimizer)
        if self.name in ("full", "scattered"):
            rank0_only = self.name == "scattered"
            return scene.fsdp.full_optim_state_dict(scene.model, optimizer, rank0_only=rank0_only)
        with self.set_on(scene):
            return scene.fsdp.optim_state_dict(scene.model, optimizer)

    def load(
        self, scene: Scene, optimizer: torch.optim.Optimizer, saved: dict[str, Any], **arguments: Any
    ) -> dict[str, Any]:
        """Return what the optimizer must load, without changing the optimizer."""
        if self.name == "sharded":
            return scene.fsdp.flatten_sharded_optim_state_dict(saved, scene.model, optimizer)
        if self.name == "full":
            return scene.fsdp.shard_full_optim_state_dict(saved, scene.model, optim=optimizer)
        if self.name == "scattered":
            return scene.fsdp.scatter_full_optim_state_dict(saved, scene.model, optim=optimizer)
        with self.set_on(scene):
            return scene.fsdp.optim_state_dict_to_load(scene.model, optimizer, saved, **arguments)

    def set_on(self, scene: Scene) -> Any:
        """Return a context manager in which the model has this state dict type."""
        api, of_kind = scene.api, self.name.capitalize()
        options = {"offload_to_cpu": self.offloads} | ({"rank0_only": True} if self.rank0_only else {})
        return scene.fsdp.state_dict_type(
            scene.model,
            api.StateDictType[f"{self.name}_STATE_DICT"],
            getattr(api, f"{of_kind}StateDictConfig")(),
            getattr(api, f"{of_kind}OptimStateDictConfig")(**options),
        )


OLDER_FULL = StateDictMethod("full")
FULL = StateDictMethod("FULL", offloads=False)
FULL_ON_RANK_0 = StateDictMethod("FULL", rank0_only=True, offloads=False)


def save_load_and_step(scene: Scene, optimized: Optimized, way: StateDictMethod) -> Any:
    """Save, load into a fresh optimizer, and step that optimizer. Return the states in between."""
    optimizer = optimized.stepped(scene.model)
    before = copied(described(optimizer.state_dict()))
    saved = way.save(scene, optimizer)
    # See deviation fsdp.offloaded_state_dicts.
    is_whole = scene.setup.keeps_parameters_whole(scene.rank.world_size)
    has_deviation = is_whole if way.offloads else way.name == "SHARDED"
    copy_state = without_places if has_deviation else copied
    result = {"order": [*saved.get("state", ())], "saved": copy_state(described(saved))}
    fresh = optimized.optimizer(scene.model)
    loaded = way.load(scene, fresh, saved)
    # The states that torch scatters are on the host or on the device, depending on the rank and the parameter.
    result["loaded"] = (on_host if way.name == "scattered" else copy_state)(described(loaded))
    fresh.load_state_dict(loaded)
    step(scene.model, fresh)
    return {**result, "before": before, "after": described(fresh.state_dict())}


def copied(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def on_host(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), value)


def without_places(value: Any) -> Any:
    """Return tensors on the CPU, and descriptions of shards without the device in their placement."""

    def without_place(text: str) -> str:
        return re.sub(r"(placement=rank:\d+)/[\w:]+", r"\1", text)

    return tree_map_only(str, without_place, on_host(value))


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer with the model's parameter names as keys."""
    names = [name for name, _ in model.named_parameters()]
    order = {parameter: name for name, parameter in zip(names, model.parameters(), strict=True)}
    numbered = [order[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    return {
        "state": {numbered[number]: param_state for number, param_state in state["state"].items()},
        "param_groups": [
            group | {"params": [numbered[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def unwrapped(optimized: Optimized, tree: ModuleTree = TREE) -> dict[str, Any]:
    """Return the optimizer state dict of the same model without wrapping, by parameter names."""
    model = tree.build()
    return by_name(model, optimized.stepped(model))


def as_tensors(value: Any) -> Any:
    """Replace each `TensorState` that a rank reported by its tensor."""
    return tree_map(lambda leaf: leaf.values if isinstance(leaf, TensorState) else leaf, value)


def assert_close_states(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Compare states by parameter names: `expected` of one process, `actual` as a rank reported them."""
    assert expected.keys() == actual.keys(), f"parameters {sorted(actual)}, expected {sorted(expected)}"
    for name, state in expected.items():
        assert state.keys() == actual[name].keys(), (
            f"{name}: {sorted(actual[name])}, expected {sorted(state)}"
        )
        for key, value in state.items():
            reported: TensorState = actual[name][key]
            assert reported.shape == tuple(value.shape), f"{name}[{key!r}] has the shape {reported.shape}"
            assert (excess := ONE_STEP.excess(value, reported.values)) is None, f"{name}[{key!r}]: {excess}"
