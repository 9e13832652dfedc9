"""Steps with parameters on several meshes, of which a rank may not be in all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from conformance.judge.outcome import observe
from conformance.ranks import Rank, RankPool
from conformance.ranks.fixtures import require_simulator
from conformance.simulator import NAME
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


@pytest.mark.parametrize("is_replicated", [False, True])
def test_slices_of_one_mesh_have_one_norm(ranks: Callable[..., RankPool], is_replicated: bool) -> None:
    """No slice has all ranks, but every rank has a slice."""
    norms = ranks(4, "cpu").run(norm_over_slices, is_replicated=is_replicated)
    expected = 6.0 if is_replicated else 8.0  # numbers of elements
    assert [norm**2 for norm in norms] == pytest.approx([expected] * 4)


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


@pytest.mark.parametrize("mesh_of_all_is_first", [False, True])
def test_inf_on_some_ranks_skips_step_on_all(
    ranks: Callable[..., RankPool], mesh_of_all_is_first: bool
) -> None:
    """Otherwise parameters on all ranks would be stepped on some of them."""
    case = scale_after_inf_on_some_ranks
    assert ranks(4, "cpu").run(case, mesh_of_all_is_first=mesh_of_all_is_first) == [(False, 4.0)] * 4


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


@pytest.mark.deadline(300)
@pytest.mark.parametrize("on", ["cpu", NAME])
def test_failure_on_one_rank_leaves_no_peer_waiting(ranks: Callable[..., RankPool], on: str) -> None:
    """Ranks of an accelerator do not read the report, and skip the step without an error."""
    if on == NAME:
        require_simulator()
    (error, total), *peers = ranks(4, on).run(step_that_fails_on_rank_0)
    assert "max_norm is nan" in error
    assert [total, *(total for _, total in peers)] == [16.0] * 4
    assert all("another rank" in error if on == "cpu" else error == "None" for error, _ in peers)
