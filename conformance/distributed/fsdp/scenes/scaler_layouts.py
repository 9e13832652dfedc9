"""Models and gradients in every layout that a scaler has to serve."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.judge.sandbox import seeding
from conformance.strategies.dtensor_gradients import PlacedGradient


def scaler_with_scale(scene: Scene, scaler: str, **options: Any) -> Any:
    """Return a scaler of the scene's library and device that has a scale, as after a first backward."""
    result = scene.library.find(scaler)(scene.rank.device.type, **options)
    result.scale(torch.ones((), device=scene.rank.device))
    return result


def plain_model() -> nn.Module:
    seeding.seed_all()
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


# Experts beside data parallelism, a mesh of two ranks, and a parameter that is no DTensor.
_SHAPES_AND_PLACEMENTS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = [
    ((8, 5), (4,), (Shard(0),)),
    ((8, 5), (2, 2), (Shard(0), Shard(1))),
    ((6,), (2, 2), (Replicate(), Shard(0))),
    ((3, 3), (2,), (Shard(0),)),
    ((4,), (4,), ()),
]


def on_meshes(seed: int, factor: float = 1.0) -> list[PlacedGradient]:
    """Return values for one parameter each, on meshes of the first of four ranks."""
    generator = seeding.generator(seed)
    return [
        PlacedGradient(
            torch.randn(shape, generator=generator) * factor, None, bool(placements), placements, mesh
        )
        for shape, mesh, placements in _SHAPES_AND_PLACEMENTS
    ]


def named_params(scene: Scene, layout: str) -> list[tuple[str, Any]]:
    if layout == "meshes":
        return [
            (f"mesh.{number}", nn.Parameter(value.on(scene.rank.mesh(*value.mesh_shape))))
            for number, value in enumerate(on_meshes(0))
        ]
    if layout == "disjoint meshes":
        halves = scene.rank.mesh(2), mesh_of_last_ranks(dist.group.WORLD, scene.rank.device.type)
        return [
            (
                f"half.{number}",
                nn.Parameter(
                    distribute_tensor(
                        torch.ones(6, device=scene.rank.device), mesh, [Shard(0)], src_data_rank=None
                    )
                ),
            )
            for number, mesh in enumerate(halves)
        ]
    model: nn.Module = plain_model().to(scene.rank.device)
    world = scene.rank.world_size
    if layout in ("dtensor", "hybrid dtensor"):
        sizes = (world,) if layout == "dtensor" else (2, world // 2)
        fully_shard(model, mesh=scene.rank.mesh(*sizes, names=("replicas", "shards")[-len(sizes) :]))
    elif layout == "hybrid":
        mesh = scene.rank.mesh(2, world // 2)
        groups = mesh.get_group(1), mesh.get_group(0)
        model = scene.wrap(model, use_orig_params=True, strategy="HYBRID_SHARD", process_group=groups)
    elif layout in ("flat parallel", "original parallel"):
        mesh = scene.rank.mesh(2, world // 2, names=("data", "model"))
        parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        originals = layout == "original parallel"
        model = scene.wrap(model, use_orig_params=originals, device_mesh=mesh["data"])
    elif layout in ("flat", "original"):
        model = scene.wrap(model, use_orig_params=layout == "original")
    return [*model.named_parameters()]


@functools.cache
def mesh_of_last_ranks(_: Any, device: str) -> DeviceMesh:
    return DeviceMesh(device, [2, 3])
