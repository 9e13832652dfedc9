"""Cases that save and load the optimizer state of a sharded model."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from conformance.distributed.fsdp.fsdp_cases import Setup, clean, gathered_parameters
from conformance.distributed.fsdp.lab import Lab
from conformance.judge.library import load_library

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


def plain(value: Any) -> Any:
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
        return {key: plain(value[key]) for key in sorted(value, key=repr)}
    return [plain(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class StateDictMethod:
    """Method of saving and loading a state dict: one of the older methods, or the state dict type that is set."""

    # Older methods are full, scattered and sharded. State dict types are FULL, SHARDED and LOCAL.
    name: str
    rank0_only: bool = False
    offloads: bool = True

    def save(self, lab: Lab, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self.name == "sharded":
            return lab.fsdp.sharded_optim_state_dict(lab.model, optimizer)
        if self.name in ("full", "scattered"):
            rank0_only = self.name == "scattered"
            return lab.fsdp.full_optim_state_dict(lab.model, optimizer, rank0_only=rank0_only)
        with self.set_on(lab):
            return lab.fsdp.optim_state_dict(lab.model, optimizer)

    def load(
        self, lab: Lab, optimizer: torch.optim.Optimizer, saved: dict[str, Any], **arguments: Any
    ) -> dict[str, Any]:
        """Return what the optimizer must load, without changing the optimizer."""
        if self.name == "sharded":
            return lab.fsdp.flatten_sharded_optim_state_dict(saved, lab.model, optimizer)
        if self.name == "full":
            return lab.fsdp.shard_full_optim_state_dict(saved, lab.model, optim=optimizer)
        if self.name == "scattered":
            return lab.fsdp.scatter_full_optim_state_dict(saved, lab.model, optim=optimizer)
        with self.set_on(lab):
            return lab.fsdp.optim_state_dict_to_load(lab.model, optimizer, saved, **arguments)

    def set_on(self, lab: Lab) -> Any:
        api = lab.api
        configs = {
            "FULL": lambda: (
                api.FullStateDictConfig(),
                api.FullOptimStateDictConfig(offload_to_cpu=self.offloads, rank0_only=self.rank0_only),
            ),
            "SHARDED": lambda: (
                api.ShardedStateDictConfig(),
                api.ShardedOptimStateDictConfig(offload_to_cpu=self.offloads),
            ),
            "LOCAL": lambda: (api.LocalStateDictConfig(), api.LocalOptimStateDictConfig(self.offloads)),
        }
        kind = api.StateDictType[f"{self.name}_STATE_DICT"]
        return lab.fsdp.state_dict_type(lab.model, kind, *configs[self.name]())


def there_and_back(lab: Lab, optimized: Optimized, way: StateDictMethod) -> Any:
    """Save, load into a fresh optimizer, and step that optimizer. Return the states in between."""
    optimizer = optimized.stepped(lab.model)
    before = copied(plain(optimizer.state_dict()))
    saved = way.save(lab, optimizer)
    # See deviation optim_state.whole_states_that_are_offloaded.
    is_whole = lab.setup.keeps_parameters_whole(lab.rank.world_size)
    copy_state = on_host if is_whole and way.offloads and way.name in ("sharded", "SHARDED") else copied
    result = {"order": [*saved.get("state", ())], "saved": copy_state(plain(saved))}
    fresh = optimized.optimizer(lab.model)
    loaded = way.load(lab, fresh, saved)
    # The states that torch scatters are on the host or on the device, depending on the rank and the parameter.
    result["found"] = (on_host if way.name == "scattered" else copy_state)(plain(loaded))
    fresh.load_state_dict(loaded)
    step(lab.model, fresh)
    return {**result, "before": before, "after": plain(fresh.state_dict())}


def saved_beside_meta(lab: Lab, way: StateDictMethod) -> Any:
    """Return the devices of saved tensors. An ignored parameter on the meta device must not be offloaded."""
    lab.plain.beside = nn.Linear(2, 2, device="meta")
    kind = {"use_orig_params": lab.setup.uses_orig_params}
    lab.model = lab.wrap(lab.plain, ignored_modules=[lab.plain.beside], **kind)
    saved = plain(way.save(lab, Optimized("momentum").stepped(lab.model)))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.device.type, saved)


def copied(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def on_host(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), value)


def outlived(lab: Lab, way: StateDictMethod) -> list[str]:
    """Return the names whose tensors survive the state dict that contained them."""
    optimizer = Optimized().stepped(lab.model)
    saved = way.save(lab, optimizer)
    held = {name: weakref.ref(state["exp_avg"]) for name, state in saved["state"].items()}
    del saved
    gc.collect()
    return [name for name, ref in held.items() if ref() is not None]


def saved_again(lab: Lab, optimized: Optimized, saved: Mapping[str, Any], way: StateDictMethod) -> Any:
    """Load a state dict from elsewhere into an optimizer, and save that optimizer."""
    fresh = optimized.optimizer(lab.model)
    is_given = lab.rank.rank == 0 or not (way.rank0_only or way.name == "scattered")
    fresh.load_state_dict(way.load(lab, fresh, copied(saved) if is_given else {}))
    return plain(StateDictMethod("FULL", offloads=False).save(lab, fresh))


def exchanged(lab: Lab, writer: str, writers: Setup, optimized: Optimized, way: StateDictMethod) -> Any:
    """Load a state that another library saved for the same module. Return it, and the states after a step."""
    wrote = Lab(lab.rank, load_library(writer), writers, lab.tree)
    saved = way.save(wrote, optimized.stepped(wrote.model))
    fresh = optimized.optimizer(lab.model)
    loaded = way.load(lab, fresh, saved)
    loaded_on_host = on_host(plain(loaded))
    fresh.load_state_dict(loaded)
    step(lab.model, fresh)
    return {"found": loaded_on_host, "after": plain(fresh.state_dict())}


def trained(lab: Lab, optimized: Optimized, way: StateDictMethod, is_interrupted: bool) -> Any:
    """Train, and save and load into another model halfway if `is_interrupted`. Return weights, losses and states."""
    optimizer = optimized.optimizer(lab.model)
    losses = [_trained_once(lab, optimizer, number) for number in range(2)]
    if is_interrupted:
        states = way.save(lab, optimizer)
        weights = gathered_parameters(lab.library, lab.model)
        lab.model = lab.wrapped(lab.tree.build(seed_shift=1))
        _fill(lab, weights)
        optimizer = optimized.optimizer(lab.model)
        optimizer.load_state_dict(way.load(lab, optimizer, states))
    losses += [_trained_once(lab, optimizer, number) for number in range(2, 5)]
    return {
        "losses": losses,
        "weights": gathered_parameters(lab.library, lab.model),
        "states": plain(optimizer.state_dict()),
    }


def _trained_once(lab: Lab, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    loss = lab.backward(number)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _fill(lab: Lab, weights: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad(), lab.fsdp.summon_full_params(lab.model):
        for name, parameter in lab.model.named_parameters():
            parameter.copy_(weights[clean(name)])


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
