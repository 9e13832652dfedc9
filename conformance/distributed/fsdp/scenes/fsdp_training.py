"""Trainings with FullyShardedDataParallel, described by plain values, on the ranks and unsharded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from conformance.distributed.fsdp.scenes.module_trees import (
    LEAVES,
    Branches,
    Chain,
    ModuleTree,
    Tied,
    call,
    loss_of,
    out_of_form,
)
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

FSDP = "distributed.fsdp.FullyShardedDataParallel"
CPU = torch.device("cpu")
LEARNING_RATE, MOMENTUM = 0.05, 0.5
COMPILER = "aot_eager"


@dataclass(frozen=True)
class Setup:
    """Arguments for wrapping a model. Arguments that are left out keep the constructor's defaults."""

    strategy: str = "FULL_SHARD"
    # Values: default, group, group of device, or mesh. Hybrid strategies also take meshes (one mesh of two dimensions)
    # or groups (a pair of process groups).
    ranks: str = "default"
    shards: int = 1  # ranks that shard one replica, for hybrid strategies
    wrap: str = "root"  # root, leaves, groups, size or manual
    arguments: Mapping[str, Any] = field(default_factory=dict)  # arguments of the constructor
    # Arguments of MixedPrecision. Each argument that ends in `_dtype` is a dtype.
    mixed_precision: Mapping[str, Any] | None = None
    backward_prefetch: str | None = "BACKWARD_PRE"
    offload_params: bool = False
    # How the first part of the body is ignored: ignored_modules, ignored_states or parameters.
    ignored: str = ""

    # Compiled modules: around (the root), or parts (the parts of the body, before they are wrapped).
    compiled: str = ""

    @property
    def uses_orig_params(self) -> bool:
        return bool(self.arguments.get("use_orig_params"))

    def keeps_parameters_whole(self, world_size: int) -> bool:
        """Return whether parameters are not sharded and `use_orig_params` is set."""
        return self.uses_orig_params and (self.strategy == "NO_SHARD" or world_size == 1)


@dataclass(frozen=True)
class Step:
    """Forwards and backwards that come before one step of the optimizer."""

    forwards: int = 1  # number of forwards, each with its own data
    # Values: in turn; together (all forwards, then one backward); no_sync (all backwards but the last run in no_sync);
    # unfinished (fully_shard gets `set_is_last_backward(False)` for all backwards but the last).
    order: str = "in turn"
    # Values: eval or no_grad (a forward in this mode), write (a write to all parameters between two forwards without
    # gradients), freeze or thaw (the first part of the body).
    before: str = ""
    set_to_none: bool = True


@dataclass(frozen=True)
class Training:
    tree: ModuleTree
    setup: Setup = Setup()
    steps: Sequence[Step] = (Step(), Step(), Step())

    @property
    def mixes_frozen_with_trained(self) -> bool:
        frozen = {leaf.frozen for leaf in self.tree.body.leaves()}
        return self.setup.uses_orig_params and (frozen != {"none"} or self.tree.head == "frozen")

    def accumulates_what_thawed(self, world_size: int) -> bool:
        """Return whether torch may lose gradients, as deviation fsdp.accumulates_what_thawed describes."""
        thaws = [number for number, step in enumerate(self.steps) if step.before == "thaw"]
        behind = self.steps[thaws[0] :] if thaws and self.setup.keeps_parameters_whole(world_size) else ()
        return any(step.order == "no_sync" and step.forwards > 1 for step in behind)

    def loses_what_is_frozen(self, world_size: int) -> bool:
        """Return whether torch may lose parameters, as deviation fsdp.frozen_without_sharding describes."""
        freezes = self.mixes_frozen_with_trained or any(step.before == "freeze" for step in self.steps)
        is_cut = self.tree.takes == "dataclass" or any(
            leaf.kind == "lookup" for leaf in self.tree.body.leaves()
        )
        return freezes and is_cut and self.setup.keeps_parameters_whole(world_size)


def train(rank: Rank, *, library: str, training: Training) -> Outcome:
    """Wrap and train. Barriers surround the backwards of each step. The outcome's value is what this rank saw."""
    return observe(_trained, rank, load_library(library), training.tree.build(), training)


def _trained(rank: Rank, library: Library, plain: nn.Module, case: Training) -> dict[str, Any]:
    model = wrapped(rank, library, plain, case.setup)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    progress = Progress(case, rank.rank, rank.device)
    shards = []
    for step in case.steps:
        dist.barrier()
        progress.accumulate(model, step)
        dist.barrier()
        shards.append(states_of(model))
        whole_gradients = gathered_gradients(library, model) if step is case.steps[-1] else {}
        optimizer.step()
        optimizer.zero_grad(step.set_to_none)
    # Without original parameters, torch may compile nothing and run the model as it is.
    if case.setup.compiled and case.setup.uses_orig_params:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    return {
        **progress.seen,
        "shards": shards,
        "whole_gradients": whole_gradients,
        "whole_parameters": gathered_parameters(library, model),
        "buffers": buffers_of(model),
    }


def states_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return copies of the value and the gradient of each parameter."""
    return {name: state_of(parameter) for name, parameter in model.named_parameters()}


def state_of(parameter: torch.Tensor) -> dict[str, Any]:
    grad = parameter.grad
    return {"value": parameter.detach().clone(), "grad": None if grad is None else grad.clone()}


class Progress:
    """Progress of one rank through the steps. Each forward gets its own data."""

    def __init__(self, case: Training, rank: int, device: torch.device = CPU) -> None:
        self.tree, self.rank, self.setup, self.device = case.tree, rank, case.setup, device
        self.forwards = 0
        self.seen: dict[str, list[Any]] = {
            "outputs": [],
            "forms": [],
            "losses": [],
            "input_gradients": [],
            "written": [],
        }

    def accumulate(self, model: nn.Module, step: Step) -> None:
        """Run everything in `step` that comes before the optimizer's step."""
        if step.before in ("freeze", "thaw"):
            for name, parameter in model.named_parameters():
                if clean(name).startswith("body.parts.0."):
                    parameter.requires_grad_(step.before == "thaw")
        elif step.before == "write":
            self._look(model, "no_grad")
            self._write(model)
            self._look(model, "no_grad")
        elif step.before:
            self._look(model, step.before)
        if step.order == "together":
            self._train(model, step.forwards)
            return
        for number in range(step.forwards):
            is_last = number == step.forwards - 1
            with accumulating(model, "" if is_last else step.order):
                self._train(model, 1)

    def _look(self, model: nn.Module, kind: str) -> None:
        """Run a forward without a backward, in eval mode if `kind` is "eval"."""
        model.train(kind != "eval")
        with torch.no_grad():
            self._forward(model)
        model.train()

    def _write(self, model: Any) -> None:
        """Scale the parameters, within `summon_full_params` if the model has that method."""
        is_wrapped = hasattr(model, "summon_full_params")
        with model.summon_full_params(model) if is_wrapped else contextlib.nullcontext(), torch.no_grad():
            for name, parameter in model.named_parameters():
                self.seen["written"].append((clean(name), str(parameter.dtype)))
                parameter.mul_(0.75)

    def _train(self, model: nn.Module, forwards: int) -> None:
        ran = [self._forward(model) for _ in range(forwards)]
        loss = torch.stack([loss_of(output) for _, output in ran]).sum()
        loss.backward()
        self.seen["losses"].append(loss.detach())
        self.seen["input_gradients"] += [x.grad for x, _ in ran]

    def _forward(self, model: nn.Module) -> tuple[torch.Tensor, Any]:
        batch = self.tree.batch(self.forwards, self.rank)
        if self.tree.takes == "dataclass":  # no root moves the tensors in a dataclass
            batch = batch.on(self.device)
        self.forwards += 1
        output = call(model, self.tree, batch)
        self.seen["outputs"].append(out_of_form(output).detach().clone())
        self.seen["forms"].append(type(output).__name__)
        return batch.x, output


@contextlib.contextmanager
def accumulating(model: Any, order: str) -> Generator[None]:
    """Context manager that sets up a backward of accumulation. It changes nothing for an unsharded model."""
    with model.no_sync() if order == "no_sync" and hasattr(model, "no_sync") else contextlib.nullcontext():
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(order != "no_sync")
            model.set_is_last_backward(order != "unfinished")
        yield


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the buffers by their names from before wrapping."""
    return {clean(name): buffer.clone() for name, buffer in model.named_buffers()}


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


# -- wrapping


def wrapped(rank: Rank, library: Library, model: nn.Module, setup: Setup) -> Any:
    make = functools.partial(library.find(FSDP), **constructor_arguments(rank, library, model, setup))
    if setup.compiled:
        torch._dynamo.reset()  # forget what the previous case compiled
        torch._dynamo.utils.counters.clear()
    if setup.compiled == "parts":
        for part in model.body.parts:
            part.compile(backend=COMPILER)
    if setup.wrap == "manual":
        model.body.parts = nn.ModuleList(make(part) for part in model.body.parts)
    whole = make(model)
    if setup.compiled == "around":
        whole.compile(backend=COMPILER)
    return whole


def constructor_arguments(rank: Rank, library: Library, model: nn.Module, setup: Setup) -> dict[str, Any]:
    fsdp = library.distributed.fsdp
    arguments = dict(setup.arguments)
    arguments["device_id"] = rank.device
    arguments["sharding_strategy"] = fsdp.ShardingStrategy[setup.strategy]
    arguments["backward_prefetch"] = (
        setup.backward_prefetch and fsdp.BackwardPrefetch[setup.backward_prefetch]
    )
    arguments |= _ranks_arguments(rank, setup)
    if setup.offload_params:
        arguments["cpu_offload"] = fsdp.CPUOffload(offload_params=True)
    if setup.mixed_precision is not None:
        arguments["mixed_precision"] = fsdp.MixedPrecision(**setup.mixed_precision)
    if (policy := _policy(library, setup.wrap)) is not None:
        arguments["auto_wrap_policy"] = policy
    first = model.body.parts[0].to(rank.device) if setup.ignored else None  # no root moves ignored modules
    if setup.ignored == "parameters":
        arguments["ignored_states"] = list(first.parameters())
    elif setup.ignored:
        arguments[setup.ignored] = [first]
    return arguments


def _policy(library: Library, wrap: str) -> Any:
    wraps = library.distributed.fsdp.wrap
    match wrap:
        case "leaves":
            return wraps.ModuleWrapPolicy(set(LEAVES))
        case "groups":
            return wraps.ModuleWrapPolicy({Chain, Branches})
        case "size":
            # Weights that two modules share stay in one unit.
            return functools.partial(
                wraps.size_based_auto_wrap_policy, min_num_params=12, force_leaf_modules={Tied}
            )
    return None


def _ranks_arguments(rank: Rank, setup: Setup) -> dict[str, Any]:
    if setup.ranks == "default":
        return {}
    if setup.ranks == "group":
        return {"process_group": dist.group.WORLD}
    if setup.ranks == "group of device":
        return {"process_group": rank.group_of_device()}
    if setup.ranks == "mesh":
        return {"device_mesh": rank.mesh(rank.world_size)}
    mesh = mesh_of(rank, setup.shards)
    if setup.ranks == "meshes":
        return {"device_mesh": mesh}
    return {"process_group": (mesh.get_group(1), mesh.get_group(0))}


def mesh_of(rank: Rank, shards: int) -> DeviceMesh:
    """Return a mesh of replicas that are each sharded over `shards` ranks."""
    return rank.mesh(rank.world_size // shards, shards, names=("replicas", "shards"))


# -- values gathered from all ranks


def gathered_parameters(library: Library, model: nn.Module) -> dict[str, torch.Tensor]:
    with library.find(FSDP).summon_full_params(model, writeback=False):
        return {clean(name): parameter.detach().clone() for name, parameter in model.named_parameters()}


def gathered_gradients(library: Library, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full gradients. Write them to the parameters and gather those, which also works for flat parameters.

    A missing gradient counts as zero, because it may share a buffer with gradients that exist.
    """
    parameters = list(model.parameters())
    originals = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        gradients = gathered_parameters(library, model)
        # Shards of offloaded parameters may still be on their way to the device, and must not change until they arrive.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        for parameter, values in zip(parameters, originals, strict=True):
            parameter.copy_(values)
    return gradients


# -- unsharded


def train_unsharded(case: Training, world_size: int) -> list[dict[str, Any]]:
    """Train unsharded in one process: one replica for each rank, whose gradients are averaged before each step."""
    replicas = [case.tree.build() for _ in range(world_size)]
    optimizers = [torch.optim.SGD(replica.parameters(), LEARNING_RATE, MOMENTUM) for replica in replicas]
    ways = [Progress(case, rank) for rank in range(world_size)]
    gradients: list[dict[str, torch.Tensor]] = []
    for step in case.steps:
        for way, replica in zip(ways, replicas, strict=True):
            way.accumulate(replica, step)
        average_gradients(replicas, case.setup)
        gradients = [
            {name: zero_for_none(parameter) for name, parameter in replica.named_parameters()}
            for replica in replicas
        ]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(step.set_to_none)
    return [
        {
            **way.seen,
            "whole_gradients": whole_gradients,
            "whole_parameters": {name: value.detach() for name, value in replica.named_parameters()},
            "buffers": dict(replica.named_buffers()),
        }
        for way, replica, whole_gradients in zip(ways, replicas, gradients, strict=True)
    ]


def zero_for_none(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def average_gradients(replicas: Sequence[nn.Module], setup: Setup) -> None:
    """Average the gradients of the replicas like the ranks do. Ignored parameters keep their own gradients."""
    for pairs in zip(*(replica.named_parameters() for replica in replicas), strict=True):
        (name, *_), parameters = zip(*pairs, strict=True)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients and not (setup.ignored and name.startswith("body.parts.0.")):
            mean = torch.stack(gradients).sum(0) / len(parameters)
            for parameter in parameters:
                parameter.grad = mean.clone()
