"""ShardedTensor and DTensor around a rank's rows, created and opened without collectives, unless noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardOf

from impl.distributed.fsdp._layout.flat_slots import FlatLayout, Slot
from impl.distributed.fsdp._params.tensor_parallel import ParallelLayout, root_mesh_of
from impl.distributed.fsdp._state_dict.redistribution import chunk_of


def sharded_tensor_of_rows(
    chunk: Tensor, slot: Slot, layout: FlatLayout, group: dist.ProcessGroup
) -> ShardedTensor:
    """Return a ShardedTensor of a parameter's rows. `chunk` contains this rank's rows."""
    chunks = [chunk_of(slot, rank, layout.world) for rank in range(layout.world)]
    trailing = [0] * (len(slot.shape) - 1)
    parts = [([rows.first_row, *trailing], list(rows.shape)) for rows in chunks]
    return _sharded(chunk.contiguous(), torch.Size(slot.shape), parts, group)


def sharded_tensor_of_flat_param(
    shard: Tensor, layout: FlatLayout, group: dist.ProcessGroup
) -> ShardedTensor:
    """Return a ShardedTensor of a flat parameter without its padding, over this rank's shard [shard_numel]."""
    width = layout.shard_numel
    lengths = [own_numel(layout, rank) for rank in range(layout.world)]
    parts = [([rank * width], [length]) for rank, length in enumerate(lengths)]
    return _sharded(shard[: lengths[group.rank()]], torch.Size([layout.numel]), parts, group)


def own_numel(layout: FlatLayout, rank: int) -> int:
    """Return the length of a rank's shard without the padding at the end of the flat parameter."""
    return max(0, min(layout.numel - rank * layout.shard_numel, layout.shard_numel))


def _sharded(
    local: Tensor, size: torch.Size, parts: Sequence[tuple[list[int], list[int]]], group: dist.ProcessGroup
) -> ShardedTensor:
    """Return a ShardedTensor over this rank's `local` tensor.

    Args:
        parts: offsets and sizes for each rank of the group. Those without rows are left out, unless `size` has none.
    """
    places = [
        ShardMetadata(offsets, sizes, _place_of(rank, local.device, group))
        for rank, (offsets, sizes) in enumerate(parts)
        if is_part(sizes, size)
    ]
    own_shards = [
        Shard(local, ShardMetadata(*parts[group.rank()], _place_of(group.rank(), local.device, group)))
    ]
    properties = TensorProperties(
        dtype=local.dtype,
        requires_grad=local.requires_grad,
        memory_format=torch.contiguous_format,
        pin_memory=local.is_pinned(),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        own_shards if is_part(parts[group.rank()][1], size) else [],
        sharded_tensor_metadata=ShardedTensorMetadata(places, size, properties),
        process_group=group,
    )


def is_part(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a ShardedTensor of this `shape` has a shard for a rank's rows, like torch's `chunk`."""
    return sizes[0] > 0 or shape[0] == 0


def _place_of(rank: int, device: torch.device, group: dist.ProcessGroup) -> str:
    """Return the placement text of a rank's shard as torch writes it, which derives the device from the rank."""
    place = f"rank:{dist.get_global_rank(group, rank)}/{device.type}"
    return place if device.type == "cpu" else f"{place}:{rank % torch.accelerator.device_count()}"


def dtensor_of_rows(chunk: Tensor, slot: Slot, mesh: DeviceMesh, layout: ParallelLayout | None) -> DTensor:
    """Return a DTensor of a parameter, sharded by rows over the last dimension of `mesh`.

    `chunk` has this rank's rows.

    The DTensor is over the root mesh of `mesh`. In the other dimensions it has the placements of `layout`.

    Collectives: none, unless tensor parallelism shards the rows too. Then the rows are gathered and sharded again in
        the order of DTensors, which every rank of the root mesh has to call.
    """
    root_mesh = root_mesh_of(mesh)
    shape, stride = (layout.shape, layout.stride) if layout else (torch.Size(slot.shape), slot.stride)
    placements = placements_in(root_mesh, mesh, layout)
    if layout is None or not layout.shards_rows:
        return _from_local(chunk.contiguous(), root_mesh, placements, shape, stride)
    shards = mesh if mesh.ndim == 1 else mesh[_names_of(mesh)[-1]]
    rows = _from_local(chunk.contiguous(), shards, [ShardOf(0)], torch.Size(slot.shape), slot.stride)
    local = _from_local(
        rows.full_tensor(), root_mesh, _without_data_sharding(placements, root_mesh, mesh), shape, stride
    )
    return local.redistribute(root_mesh, placements)


def rows_in(value: DTensor, slot: Slot, mesh: DeviceMesh, layout: ParallelLayout | None) -> Tensor:
    """Return this rank's rows of the tensor that the unit shards, from a DTensor of any placements on the root mesh.

    Collectives: none if the DTensor has the placements of `dtensor_of_rows` and tensor parallelism shards no rows;
        else a redistribution, which every rank of the root mesh has to call.
    """
    root_mesh = root_mesh_of(mesh)
    placements = placements_in(root_mesh, mesh, layout)
    if (
        value.device_mesh == root_mesh
        and [*value.placements] == placements
        and not (layout and layout.shards_rows)
    ):
        return value.to_local()
    local = value.redistribute(root_mesh, _without_data_sharding(placements, root_mesh, mesh)).to_local()
    chunk = chunk_of(slot, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    return local[chunk.first_row : chunk.stop_row]


def unsharded_in(value: DTensor, mesh: DeviceMesh, layout: ParallelLayout) -> Tensor:
    """Return the tensor that the unit shards, from a DTensor over the mesh of tensor parallelism or the root mesh."""
    if value.device_mesh == layout.mesh:
        return layout.local_part(value)
    root_mesh = root_mesh_of(mesh)
    return value.redistribute(
        root_mesh, _without_data_sharding(placements_in(root_mesh, mesh, layout), root_mesh, mesh)
    ).to_local()


def placements_in(root_mesh: DeviceMesh, mesh: DeviceMesh, layout: ParallelLayout | None) -> list[Placement]:
    placements: list[Placement] = [Replicate() for _ in range(root_mesh.ndim)]
    placements[_dim_in(root_mesh, mesh)] = ShardOf(0)
    for name, placement in zip(_names_of(layout.mesh), layout.placements, strict=True) if layout else ():
        placements[_names_of(root_mesh).index(name)] = placement
    return placements


def _without_data_sharding(
    placements: Sequence[Placement], root_mesh: DeviceMesh, mesh: DeviceMesh
) -> list[Placement]:
    dim = _dim_in(root_mesh, mesh)
    return [Replicate() if place == dim else placement for place, placement in enumerate(placements)]


def _dim_in(root_mesh: DeviceMesh, mesh: DeviceMesh) -> int:
    """Return the dimension that parameters are sharded over: the last one of `mesh`."""
    return root_mesh.ndim - 1 if root_mesh == mesh else _names_of(root_mesh).index(_names_of(mesh)[-1])


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def shape_of(value: Any) -> torch.Size:
    """Return a tensor's shape. That of a ShardedTensor is read from its metadata, because torch warns otherwise."""
    return torch.Size(value.metadata().size) if isinstance(value, ShardedTensor) else value.shape


def dtype_of(value: Any) -> torch.dtype:
    """Return a tensor's dtype, that of a ShardedTensor from its metadata."""
    return value.metadata().tensor_properties.dtype if isinstance(value, ShardedTensor) else value.dtype


def chunk_in(value: Any, expected: type, rank: int) -> Tensor | None:
    """Return this rank's part of a ShardedTensor or DTensor, or None if it has none.

    Raises:
        AssertionError: the value has another type, or several local shards.
    """
    if type(value) is not expected:
        raise AssertionError(f"Expected {expected.__name__}, got {type(value)}")
    if isinstance(value, DTensor):
        return value.to_local()
    shards = value.local_shards()
    if len(shards) > 1:
        raise AssertionError(f"Expects 0 or 1 shard per rank but got {len(shards)} shards on rank {rank}.")
    return shards[0].tensor if shards else None
