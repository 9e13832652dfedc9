"""Cases of steps with parameters on several meshes, of which a rank may not be in all."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from conformance.judge.outcome import observe
from conformance.ranks import Rank
from impl.amp import GradScaler
from impl.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def norm_over_slices(rank: Rank, *, is_replicated: bool) -> float:
    """Return the norm of one parameter for each dimension of a mesh of four ranks, each with a gradient of ones."""
    whole = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    placements: list[Placement] = [Replicate() if is_replicated else Shard(0)]
    parameters = [
        nn.Parameter(DTensor.from_local(torch.ones(2), whole["tp"], placements)),
        nn.Parameter(DTensor.from_local(torch.ones(2), whole["dp"], [Shard(0)])),
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    scaler: Any = (GradScaler if is_replicated else ShardedGradScaler)("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    return scaler.fused_step(torch.optim.SGD(parameters, 0.5)).item()


def scale_after_inf_on_some_ranks(rank: Rank, *, mesh_of_all_is_first: bool) -> tuple[bool | None, float]:
    """Unscale gradients, one with inf on two ranks only. Return whether a step was taken, and the scale."""
    meshes = [DeviceMesh(rank.device.type, range(rank.world_size)), DeviceMesh(rank.device.type, [0, 1])]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for mesh in meshes]
    for parameter, value, mesh in zip(parameters, (1.0, math.inf), meshes, strict=True):
        parameter.grad = distribute_tensor(torch.full((4,), value), mesh, [Shard(0)])
    optimizer = torch.optim.SGD(parameters if mesh_of_all_is_first else parameters[::-1], 0.5)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    taken = scaler.step_was_taken(optimizer)
    scaler.update()
    return taken, scaler.get_scale()


def step_that_fails_on_rank_0(rank: Rank) -> tuple[str, float]:
    """Step a parameter that is sharded along two dimensions. Return the error of this rank, and the elements' sum."""
    mesh = init_device_mesh(rank.device.type, (2, 2))
    values = distribute_tensor(torch.ones(4, 4, device=rank.device), mesh, [Shard(0), Shard(1)])
    parameter = nn.Parameter(values)
    parameter.grad = torch.ones_like(parameter)
    scaler = ShardedGradScaler(rank.device.type, init_scale=8.0)
    scaler.scale(torch.ones((), device=rank.device))
    max_norm = math.nan if rank.rank == 0 else 1.0
    error = observe(scaler.fused_step, torch.optim.SGD([parameter], 0.5), max_norm).raised
    return str(error), cast("DTensor", parameter).full_tensor().sum().item()
