"""Probes of wrapping itself: what is refused or warned about, what is built late, what starts alike on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from conformance.distributed.fsdp.fsdp_cases import (
    FSDP,
    Setup,
    clean,
    gathered_parameters,
    groups_put_back,
    mesh_of,
    wrapped,
)
from conformance.distributed.fsdp.method_cases import TREE, Lab, named
from conformance.distributed.fsdp.module_trees import LEAVES, call, loss_of
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank


@dataclass
class Site:
    """A plain model, about to be wrapped."""

    rank: Rank
    library: Library
    model: Any

    def wrap(self, model: Any = None, **arguments: Any) -> Any:
        arguments.setdefault("device_id", self.rank.device)
        return self.library.find(FSDP)(self.model if model is None else model, **arguments)

    def strategy(self, name: str) -> Any:
        return self.library.distributed.fsdp.ShardingStrategy[name]

    def leaf_by_leaf(self) -> Any:
        return self.library.distributed.fsdp.wrap.ModuleWrapPolicy(set(LEAVES))


def construct(rank: Rank, *, library: str, way: str) -> Outcome:
    """What comes of one of `WAYS`: the strategy, whose module it is, names and sizes of what this rank holds."""
    site = Site(rank, load_library(library), TREE.build())

    def run() -> Any:
        made = (WAYS | USED_UP)[way](site)
        return {
            "strategy": made.sharding_strategy.name,
            "wraps what it was given": made.module is site.model,
            "parameters": {
                name: [tuple(parameter.shape), parameter.requires_grad]
                for name, parameter in made.named_parameters()
            },
        }

    with groups_put_back():
        return observe(run)


def logged(rank: Rank, *, library: str) -> list[str]:
    """What wrapping and a step write to any log, from the level of warnings on, in a process new to the library."""
    records: list[logging.LogRecord] = []
    with mock.patch.object(logging.Logger, "handle", lambda _, record: records.append(record)):
        model = Site(rank, load_library(library), TREE.build()).wrap(use_orig_params=True)
        loss_of(call(model, TREE, TREE.batch(0, rank.rank))).backward()
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def _with_a_scalar(site: Site) -> nn.Module:
    site.model.scalar = nn.Parameter(torch.tensor(1.0))
    return site.model


def _wrapped_twice(site: Site) -> Any:
    site.model.head = site.wrap(site.model.head)
    return site.wrap(auto_wrap_policy=site.leaf_by_leaf())


THE_ROOT_IGNORED = "the root ignored"
WAYS: dict[str, Callable[[Site], Any]] = {
    "group and mesh": lambda site: site.wrap(
        process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (site.rank.world_size,))
    ),
    "modules and states ignored": lambda site: site.wrap(
        ignored_modules=[site.model.head], ignored_states=[site.model.head]
    ),
    "ignored states of two kinds": lambda site: site.wrap(
        ignored_states=[site.model.head, site.model.head.weight]
    ),
    "ignored modules that are none": lambda site: site.wrap(ignored_modules=[site.model.head.weight]),
    "ignored states that are none": lambda site: site.wrap(ignored_states=[1, 2]),
    "ignored modules that do not iterate": lambda site: site.wrap(ignored_modules=site.model.head),
    THE_ROOT_IGNORED: lambda site: site.wrap(ignored_modules=[site.model]),
    "a unit ignored": lambda site: site.wrap(ignored_modules=[site.wrap(site.model.head)]),
    "hybrid without groups": lambda site: site.wrap(sharding_strategy=site.strategy("HYBRID_SHARD")),
    "hybrid with one group": lambda site: site.wrap(
        sharding_strategy=site.strategy("HYBRID_SHARD"),
        process_group=dist.group.WORLD,
        auto_wrap_policy=site.leaf_by_leaf(),
    ),
    "hybrid with a mesh of one dimension": lambda site: site.wrap(
        sharding_strategy=site.strategy("HYBRID_SHARD"),
        device_mesh=init_device_mesh("cpu", (site.rank.world_size,)),
        auto_wrap_policy=site.leaf_by_leaf(),
    ),
    "a mesh of two dimensions that is not hybrid": lambda site: site.wrap(device_mesh=mesh_of(site.rank, 1)),
    "a scalar parameter": lambda site: site.wrap(_with_a_scalar(site)),
    "a lazy module": lambda site: site.wrap(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))),
    "no sharding": lambda site: site.wrap(sharding_strategy=site.strategy("NO_SHARD")),
    "a container": lambda site: site.wrap(nn.ModuleList([nn.Linear(2, 2)])),
    "wrapped inside already": _wrapped_twice,
    "no parameters": lambda site: site.wrap(nn.Tanh()),
    "no module": lambda site: site.wrap("a word"),
    "an init function that is none": lambda site: site.wrap(param_init_fn="no function"),
    "a policy that is none": lambda site: site.wrap(auto_wrap_policy="no policy"),
    "a device by name": lambda site: site.wrap(device_id="cpu"),
    "empty arguments": lambda site: site.wrap(ignored_modules=[], ignored_states=None),
}
# Arguments that can be read once.
USED_UP: dict[str, Callable[[Site], Any]] = {
    "ignored modules from a generator": lambda site: site.wrap(
        ignored_modules=(module for module in [site.model.head])
    ),
}


# -- modules that are built late


class _WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def materialised(rank: Rank, *, library: str, by: str, strategy: str) -> Outcome:
    """A module on the meta device, whole once it is wrapped: `by` reset_parameters, a function, or nothing at all."""
    found = load_library(library)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 2)))
    if by == "no reset":
        plain.append(_WithoutReset())

    def run() -> Any:
        torch.manual_seed(0)
        site = Site(rank, found, plain)
        arguments = {"param_init_fn": _fill} if by == "function" else {}
        policy = found.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Linear})
        model = site.wrap(auto_wrap_policy=policy, sharding_strategy=site.strategy(strategy), **arguments)
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return {"loss": loss.detach(), "whole": gathered_parameters(found, model)}

    with groups_put_back():
        return observe(run)


def _fill(module: nn.Module) -> None:
    """As users write them: for this module's own parameters."""
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) * 0.1)


# -- modules whose parameters are dealt already


def tensor_parallel(rank: Rank, *, library: str, use_orig_params: bool, ignored: bool) -> Outcome:
    """A step of a module of which one layer is parallel over a dimension of its own of the mesh."""
    found, plain = load_library(library), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    _fill_all(plain)

    def run() -> Any:
        mesh = init_device_mesh("cpu", (rank.world_size, 1), mesh_dim_names=("sharded", "parallel"))
        parallelize_module(plain, mesh["parallel"], {"2": ColwiseParallel()})
        model = Site(rank, found, plain).wrap(
            device_mesh=mesh["sharded"],
            use_orig_params=use_orig_params,
            ignored_states=list(plain[2].parameters()) if ignored else None,
        )
        loss = model(torch.ones(2, 3) * (1 + rank.rank)).square().sum()
        loss.backward()
        return {"loss": loss.detach(), "gradients": [_local(p.grad) for p in model.parameters()]}

    with groups_put_back():
        return observe(run)


def _fill_all(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))


def _local(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


# -- states that are made equal


def synchronised(rank: Rank, *, library: str, setup: Setup) -> Outcome:
    """What the ranks hold after each came with values and buffers of its own."""
    found, plain = load_library(library), TREE.build(rank.rank)
    with torch.no_grad():
        for buffer in plain.buffers():
            buffer.add_(rank.rank + 1)

    def run() -> Any:
        model = wrapped(rank, found, plain, setup)
        buffers = {clean(name): buffer.clone() for name, buffer in model.named_buffers()}
        return {"whole": gathered_parameters(found, model), "buffers": buffers}

    with groups_put_back():
        return observe(run)


def moved_away(rank: Rank, *, library: str, setup: Setup, returns: bool = False) -> Outcome:
    """A forward after the parameters were moved to where nothing can be gathered from, and perhaps back."""
    model = wrapped(rank, load_library(library), TREE.build(), setup)

    def run() -> torch.Tensor:
        model.to("meta")
        if returns:
            model.to_empty(device=rank.device)
            for parameter in model.parameters():
                parameter.data.fill_(0.5)
        return loss_of(call(model, TREE, TREE.batch(0, rank.rank))).detach()

    return observe(run)


# -- what a wrapped module is to its user


def attributes(lab: Lab) -> dict[str, Any]:
    model = lab.model
    return {
        "module": type(model.module).__name__,
        "wrapped": model.module is model._fsdp_wrapped_module,
        "attribute": model.tree == lab.tree,
        "inner attribute": model.body.out_width,
        "missing": hasattr(model, "no_such_name"),
        "units": [type(unit.module).__name__ for unit in lab.units],
        "root only": [unit is model for unit in lab.fsdp.fsdp_modules(model, root_only=True)],
        "root of a part": len(lab.fsdp.fsdp_modules(model.body.parts[0])),
        "names": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "prefixed": [name for name, _ in model.named_parameters(prefix="a")],
        "own": [name for name, _ in model.named_parameters("a", False)],
        "prefixed buffers": [name for name, _ in model.named_buffers("a")],
        "buffers prefixed by keyword": [name for name, _ in model.named_buffers(prefix="a")],
        "own buffers": [name for name, _ in model.named_buffers("a", recurse=False)],
        "repr": repr(model),
    }


def roots(lab: Lab) -> dict[str, Any]:
    """Who is the root is known once one has been asked."""
    before = [unit._is_root for unit in lab.units]
    return {
        "before": before,
        "asked": lab.model.check_is_root(),
        "inner": [unit.check_is_root() for unit in lab.units[1:]],
        "root only": len(lab.fsdp.fsdp_modules(lab.model, root_only=True)),
        "by body": len(lab.fsdp.fsdp_modules(lab.model.body, root_only=True)),
    }


def differing(rank: Rank, *, library: str, argument: str) -> Outcome:
    """An inner unit has an argument that a root and its units must have alike."""
    site = Site(rank, load_library(library), TREE.build())
    site.model.head = site.wrap(site.model.head, **{argument: True})
    model = site.wrap(**{argument: False})
    return observe(model.check_is_root)


def indexed(rank: Rank, *, library: str) -> Outcome:
    """A wrapped Sequential takes indices."""
    found, plain = load_library(library), nn.Sequential(nn.Linear(2, 3), nn.Tanh())

    def run() -> Any:
        model = Site(rank, found, plain).wrap()
        return [type(model[0]).__name__, type(model[1]).__name__, len(list(model.named_modules()))]

    return observe(run)


def applied(lab: Lab) -> dict[str, Any]:
    """`apply` shows whole parameters under their own names, and keeps what it is told."""
    seen: list[Any] = []

    def visit(module: nn.Module) -> None:
        seen.append([type(module).__name__, [tuple(p.shape) for p in module.parameters(recurse=False)]])
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(0.5)

    returned = lab.model.apply(visit)
    return {
        "seen": seen,
        "is itself": returned is lab.model,
        "whole": gathered_parameters(lab.library, lab.model),
        "loss": lab.backward(),
    }


def converted(lab: Lab, *, how: str) -> dict[str, Any]:
    """The dtype is changed after wrapping, before or after a first step; then it trains on."""
    conversions: dict[str, Callable[[nn.Module], Any]] = {
        "double": lambda model: model.double(),
        "to": lambda model: model.to(torch.float64),
        "cpu": lambda model: model.cpu(),
    }
    returned = conversions[how](lab.model)
    dtype = next(lab.model.parameters()).dtype
    batch = lab.tree.batch(0, lab.rank.rank)
    x = batch.x.detach().to(dtype)
    loss = loss_of(call(lab.model, lab.tree, type(batch)(x, batch.ids)))
    loss.backward()
    return {
        "is itself": returned is lab.model,
        "shards": named(lab.model),
        "gradients": lab.gradients(),
        "whole": gathered_parameters(lab.library, lab.model),
    }


def moved_between(lab: Lab) -> dict[str, Any]:
    """To where the parameters are, between forward and backward."""
    batch = lab.tree.batch(0, lab.rank.rank)
    loss = loss_of(call(lab.model, lab.tree, batch))
    lab.model.to(lab.rank.device)
    loss.backward()
    return {"gradients": lab.gradients(), "whole": gathered_parameters(lab.library, lab.model)}
