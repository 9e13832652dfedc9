"""Meshes of fully_shard with named dimensions, and settings of replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from conformance.distributed.fsdp.scenes.fully_shard_training import registered, values_and_gradients
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import PlainTwins, TwinsOf, raises
from conformance.judge.clauses import clause


def train_on_whole_mesh(
    scene: Scene,
    *,
    dims: dict[str, Any],
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    parallel: str | None,
    policies: str = "",
) -> list[Any]:
    """Run two steps of a model whose weights are sharded over the dimension `parallel` of the mesh.

    Ranks along the other dimensions have different rows of the batch.
    """
    mesh = scene.rank.mesh(*sizes, names=names)
    model = _spread(mesh, parallel)
    arguments = {"mesh": mesh, "dp_mesh_dims": scene.api.DataParallelMeshDims(**dims)}
    if policies == "mixed":
        arguments["mp_policy"] = scene.api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if policies == "offloaded":
        arguments["offload_policy"] = scene.api.CPUOffloadPolicy(pin_memory=False)
    scene.shard(model[2], **arguments)
    scene.shard(model, **arguments)
    snapshots: list[Any] = [registered(model)]
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)
    rows = [Replicate() if name == parallel else Shard(0) for name in names]
    batch = distribute_tensor(inputs, mesh, rows, src_data_rank=None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        loss = model(batch).square().mean()
        loss.backward()
        snapshots += [loss.full_tensor().detach(), values_and_gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*snapshots, registered(model), values_and_gradients(model)]


def _spread(mesh: DeviceMesh, parallel: str | None) -> Any:
    """Return a model whose first weight is sharded by rows and whose last weight is sharded by columns."""

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            shard = Shard(0 if name == "0" else 1)
            where = [
                shard if dimension == parallel else Replicate() for dimension in mesh.mesh_dim_names or ()
            ]
            spread = distribute_tensor(module.weight.detach(), mesh, where, src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(spread))

    layers = [nn.Linear(3, 4, dtype=torch.float64), nn.Identity(), nn.Linear(4, 5, dtype=torch.float64)]
    return distribute_module(filled(nn.Sequential(*layers)), mesh, partition)


@clause("distributed.fsdp.fully_shard.dp_mesh_dims")
@pytest.mark.parametrize(
    ("dims", "sizes", "names", "parallel"),
    [
        ({"shard": "data"}, (2,), ("data",), None),
        ({"replicate": "data"}, (2,), ("data",), None),
        ({"shard": "data"}, (2, 2), ("data", "model"), "model"),
        ({"shard": "data"}, (2, 2), ("model", "data"), "model"),
        ({"shard": "data", "replicate": "replicas"}, (2, 2), ("replicas", "data"), None),
        ({"shard": ("a", "b")}, (2, 2), ("a", "b"), None),
        pytest.param(
            {"shard": "data", "replicate": "replicas"},
            (2, 2, 2),
            ("replicas", "data", "model"),
            "model",
            marks=pytest.mark.profile("deep"),
        ),
    ],
    ids=["sharded", "replicated", "before another", "behind another", "both", "flattened", "three"],
)
@pytest.mark.parametrize(
    "policies",
    [
        pytest.param("", id="plain"),
        *(pytest.param(policy, marks=pytest.mark.profile("full")) for policy in ("mixed", "offloaded")),
    ],
)
@pytest.mark.world_sizes(fewest=2)
def test_named_mesh_dimensions_shard_like_torch(
    plain_twins_of: TwinsOf,
    *,
    dims: dict[str, Any],
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    parallel: str | None,
    policies: str,
    world_size: int,
) -> None:
    arguments = {"dims": dims, "sizes": sizes, "names": names, "parallel": parallel, "policies": policies}
    plain_twins_of(math.prod(sizes)).agree(train_on_whole_mesh, **arguments)


def place_on_replicas(scene: Scene) -> None:
    """Pass a placement function on a mesh that only replicates."""
    mesh = scene.mesh(names=("data",))
    layer, dims = _spread(mesh, None)[2], scene.api.DataParallelMeshDims(replicate="data")
    scene.shard(layer, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=lambda parameter: None)


@clause("distributed.fsdp.fully_shard.settings_of_meshes")
def test_replicas_refuse_placement_function(plain_twins: PlainTwins) -> None:
    outcomes = plain_twins.agree(place_on_replicas, may_raise=True)
    assert raises(ValueError, "shard_placement_fn is not supported")(outcomes), outcomes


def set_on_replicas(scene: Scene, method: str) -> None:
    """Call `method` on a sharded root around a replicated layer."""
    mesh = scene.mesh(names=("data",))
    model, dims = _spread(mesh, None), scene.api.DataParallelMeshDims
    scene.shard(model[2], mesh=mesh, dp_mesh_dims=dims(replicate="data"))
    scene.shard(model, mesh=mesh, dp_mesh_dims=dims(shard="data"))
    batch = distribute_tensor(torch.ones(2, 3, dtype=torch.float64), mesh)
    model(batch)
    getattr(model, method)(True)


@clause("distributed.fsdp.fully_shard.settings_of_copies")
@pytest.mark.parametrize("method", ["set_reshard_after_forward", "set_separate_reduce_scatter_group"])
def test_shard_settings_of_replicas_are_refused(plain_twins: PlainTwins, method: str) -> None:
    plain_twins.check_both(raises(AssertionError), set_on_replicas, method=method)
