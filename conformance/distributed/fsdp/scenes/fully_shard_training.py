"""Trainings with fully_shard, described by plain values. Each rank returns the tensors that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from conformance.distributed.fsdp.scenes.fsdp_training import (
    LEARNING_RATE,
    MOMENTUM,
    Progress,
    Setup,
    Step,
    Training,
    mesh_of,
    zero_for_none,
)
from conformance.distributed.fsdp.scenes.module_trees import LEAVES, Branches, Chain, ModuleTree
from conformance.judge.library import Library, load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank

FULLY_SHARD = "distributed.fsdp.fully_shard"


@dataclass(frozen=True)
class Sharding:
    """Arguments for sharding a model. Arguments that are left out keep the defaults of fully_shard."""

    # Units besides the root: root (none), leaves, groups, nested (leaves and groups), list (all leaves as one group).
    units: str = "leaves"
    ranks: str = "default"  # values: default, mesh, replicas of `shards` ranks each
    shards: int = 1
    reshard_after_forward: bool | int | None = None
    policy: Mapping[str, Any] | None = None  # arguments of MixedPrecisionPolicy
    offloads: bool = False
    places: bool = False  # matrices sharded by their last dimension, if that is even
    meshes: bool = False  # matrices sharded over replicas of `shards` ranks each
    ignores: bool = False  # parameters of the body's first part are ignored


@dataclass(frozen=True)
class ShardedTraining:
    tree: ModuleTree
    sharding: Sharding = Sharding()
    steps: Sequence[Step] = (Step(), Step(), Step())

    @property
    def plain(self) -> Training:
        """The same training without sharding."""
        ignored = "parameters" if self.sharding.ignores else ""
        return Training(self.tree, Setup(ignored=ignored), self.steps)


def train(
    rank: Rank, *, library: str, training: ShardedTraining, reshards_after_evaluations: bool = False
) -> Outcome:
    """Shard and train, with a barrier before and after each step's backward."""
    plain = training.tree.build()
    return observe(_trained, rank, load_library(library), plain, training, reshards_after_evaluations)


def _trained(
    rank: Rank, library: Library, plain: nn.Module, case: ShardedTraining, reshards_after_evaluations: bool
) -> dict[str, Any]:
    model = sharded(rank, library, plain, case.sharding)
    # Without foreach, because torch's list operators do not mix plain tensors (ignored parameters) with DTensors.
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM, foreach=False)
    progress = _ShardedProgress(case.plain, rank.rank, rank.device, reshards_after_evaluations)
    shards = []
    whole_gradients: dict[str, torch.Tensor] = {}
    for step in case.steps:
        dist.barrier()
        progress.accumulate(model, step)
        dist.barrier()
        shards.append(values_and_gradients(model))
        if step is case.steps[-1]:
            whole_gradients = {
                name: full_value(zero_for_none(parameter)) for name, parameter in model.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad(step.set_to_none)
    return {
        **progress.seen,
        "shards": shards,
        "whole_gradients": whole_gradients,
        "whole_parameters": {name: full_value(parameter) for name, parameter in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "state_dict": {name: described(value) for name, value in model.state_dict().items()},
    }


class _ShardedProgress(Progress):
    """Progress that also records what the modules hold after each forward."""

    def __init__(
        self, case: Training, rank: int, device: torch.device, reshards_after_evaluations: bool
    ) -> None:
        super().__init__(case, rank, device)
        self.seen["registered"] = []
        self._reshards_after_evaluations = reshards_after_evaluations

    def _look(self, model: nn.Module, kind: str) -> None:
        super()._look(model, kind)
        if self._reshards_after_evaluations:
            reshard_all(model)

    def _write(self, model: nn.Module) -> None:
        # Deviation fully_shard.written_after_evaluation: torch's forward reads values kept after an evaluation.
        reshard_all(model)
        super()._write(model)

    def _forward(self, model: nn.Module) -> Any:
        output = super()._forward(model)
        # Deviation fully_shard.written_after_evaluation: units may stay unsharded after an evaluation.
        if torch.is_grad_enabled():
            self.seen["registered"].append(registered(model))
        return output


def reshard_all(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


# -- sharding


def sharded(rank: Rank, library: Library, model: Any, sharding: Sharding) -> Any:
    fully_shard = library.find(FULLY_SHARD)
    keywords = arguments(rank, library, model, sharding)
    if sharding.units == "list":
        fully_shard([module for module in model.modules() if isinstance(module, LEAVES)], **keywords)
    else:
        for module in units_of(model, sharding.units):
            fully_shard(module, **keywords)
    return fully_shard(model, **keywords)


def units_of(model: nn.Module, units: str) -> list[nn.Module]:
    """Return the units inside the root, innermost first."""
    kinds = {"root": (), "leaves": LEAVES, "groups": (Chain, Branches), "nested": (*LEAVES, Chain, Branches)}
    return [module for module in reversed(list(model.modules())) if isinstance(module, kinds[units])]


def arguments(rank: Rank, library: Library, model: Any, sharding: Sharding) -> dict[str, Any]:
    fsdp = library.distributed.fsdp
    keywords: dict[str, Any] = {}
    if (mesh := mesh_for(rank, sharding)) is not None:
        keywords["mesh"] = mesh
    if sharding.reshard_after_forward is not None:
        keywords["reshard_after_forward"] = sharding.reshard_after_forward
    if sharding.policy is not None:
        keywords["mp_policy"] = fsdp.MixedPrecisionPolicy(**sharding.policy)
    if sharding.offloads:
        keywords["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
    if sharding.ignores:
        ignored = model.body.parts[0].to(rank.device)  # no root moves ignored parameters
        keywords["ignored_params"] = set(ignored.parameters())
    if sharding.places:
        ranks = rank.world_size if sharding.ranks != "replicas" else sharding.shards
        keywords["shard_placement_fn"] = lambda parameter: _place(parameter, ranks)
    if sharding.meshes:
        keywords["shard_placement_fn"] = _over_mesh(mesh_of(rank, sharding.shards))
    return keywords


def _over_mesh(mesh: DeviceMesh) -> Callable[[torch.Tensor], Any]:
    replicas = _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    placement: Any = _fsdp_common.ShardPlacementResult(None, replicas)  # exists in torch 2.13 and later
    return lambda parameter: placement if parameter.dim() > 1 else None


def _place(parameter: torch.Tensor, ranks: int) -> Shard | None:
    is_even = parameter.dim() > 1 and parameter.shape[-1] % ranks == 0
    return Shard(-1) if is_even else None


def mesh_for(rank: Rank, sharding: Sharding) -> DeviceMesh | None:
    match sharding.ranks:
        case "mesh":
            return rank.mesh(rank.world_size, names=("data",))
        case "replicas":
            return mesh_of(rank, sharding.shards)
    return None


# -- results of a rank


def values_and_gradients(model: nn.Module) -> dict[str, Any]:
    """Return this rank's value and gradient of each parameter."""
    return {
        name: {"value": described(parameter), "grad": described(parameter.grad)}
        for name, parameter in model.named_parameters()
    }


def registered(model: nn.Module) -> dict[str, str]:
    """Return the current layout of each parameter, which shows whether its unit is sharded."""
    return {name: layout_of(parameter) for name, parameter in model.named_parameters()}


def layout_of(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    mesh = tensor.device_mesh
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.placements} of {mesh.mesh_dim_names} {mesh.mesh.tolist()}"


def described(tensor: Any) -> Any:
    """Return the layout and local values of a tensor, or any other value unchanged."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return {
        "layout": layout_of(tensor),
        "stride": tensor.stride(),
        "kind": type(tensor).__name__,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "local": local.detach().clone(),
    }


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. All ranks must call this function together."""
    detached = tensor.detach()
    if isinstance(detached, DTensor):
        device = detached.device
        # Offloaded shards are gathered on the mesh's device, because NCCL has no backend for the CPU.
        detached = detached.to(detached.device_mesh.device_type).full_tensor().to(device)
    # Return a copy, because on one rank the full tensor is the shard itself.
    return detached.clone()


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full parameters on the CPU."""
    return {name: full_value(parameter).cpu() for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the full gradients on the CPU."""
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: None if grad is None else full_value(grad).cpu() for name, grad in gradients}
