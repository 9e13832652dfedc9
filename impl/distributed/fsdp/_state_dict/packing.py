"""ShardedTensor and DTensor around what one rank holds, made and opened without a word to the other ranks."""

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


def chunked(chunk: Tensor, slot: Slot, layout: FlatLayout, group: dist.ProcessGroup) -> ShardedTensor:
    """A ShardedTensor of a parameter's rows, of which `chunk` is this rank's."""
    chunks = [chunk_of(slot, rank, layout.world) for rank in range(layout.world)]
    behind = [0] * (len(slot.shape) - 1)
    parts = [([one.first_row, *behind], list(one.shape)) for one in chunks]
    return _sharded(chunk.contiguous(), torch.Size(slot.shape), parts, group)


def flattened(shard: Tensor, layout: FlatLayout, group: dist.ProcessGroup) -> ShardedTensor:
    """A ShardedTensor of a flat parameter without its tail, over this rank's shard [shard_numel] of it."""
    width = layout.shard_numel
    lengths = [own_numel(layout, rank) for rank in range(layout.world)]
    parts = [([rank * width], [length]) for rank, length in enumerate(lengths)]
    return _sharded(shard[: lengths[group.rank()]], torch.Size([layout.numel]), parts, group)


def own_numel(layout: FlatLayout, rank: int) -> int:
    """How long a rank's shard is without the tail that evens out the shards."""
    return max(0, min(layout.numel - rank * layout.shard_numel, layout.shard_numel))


def _sharded(
    local: Tensor, size: torch.Size, parts: Sequence[tuple[list[int], list[int]]], group: dist.ProcessGroup
) -> ShardedTensor:
    """
    Args:
        parts: for each rank of the group offsets and sizes; those of no elements count as none.
    """
    places = [
        ShardMetadata(offsets, sizes, _place_of(rank, local.device, group))
        for rank, (offsets, sizes) in enumerate(parts)
        if sizes[0]
    ]
    mine = [Shard(local, ShardMetadata(*parts[group.rank()], _place_of(group.rank(), local.device, group)))]
    properties = TensorProperties(
        dtype=local.dtype, requires_grad=local.requires_grad, memory_format=torch.contiguous_format
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine if parts[group.rank()][1][0] else [],
        sharded_tensor_metadata=ShardedTensorMetadata(places, size, properties),
        process_group=group,
    )


def _place_of(rank: int, device: torch.device, group: dist.ProcessGroup) -> str:
    """As torch writes it, which takes each rank's device from its number."""
    place = f"rank:{dist.get_global_rank(group, rank)}/{device.type}"
    return place if device.type == "cpu" else f"{place}:{rank % torch.accelerator.device_count()}"


def meshed(chunk: Tensor, slot: Slot, mesh: DeviceMesh, form: ParallelLayout | None = None) -> DTensor:
    """A DTensor of a parameter, sharded by rows over the last dimension of `mesh`, of which `chunk` is this rank's.

    It lies over all of the mesh that `mesh` was cut out of, and in the other dimensions as `form` says.

    Collectives: none, unless tensor parallelism cuts the rows as well: then those that bring them together, and apart
        in the order that DTensors have, which every rank of the whole mesh has to call.
    """
    whole = root_mesh_of(mesh)
    shape, stride = (form.shape, form.stride) if form else (torch.Size(slot.shape), slot.stride)
    placements = placements_in(whole, mesh, form)
    if form is None or not form.shards_rows:
        return _from_local(chunk.contiguous(), whole, placements, shape, stride)
    shards = mesh if mesh.ndim == 1 else mesh[_names_of(mesh)[-1]]
    rows = _from_local(chunk.contiguous(), shards, [ShardOf(0)], torch.Size(slot.shape), slot.stride)
    local = _from_local(rows.full_tensor(), whole, _unsharded(placements, whole, mesh), shape, stride)
    return local.redistribute(whole, placements)


def rows_in(value: DTensor, slot: Slot, mesh: DeviceMesh, form: ParallelLayout | None) -> Tensor:
    """The rows of this rank of what the unit shards, out of a DTensor that is laid out in any way over the whole mesh.

    Collectives: none of one that is as `meshed` makes it where tensor parallelism cuts no rows; else what
        redistributes it, which every rank of the whole mesh has to call.
    """
    whole = root_mesh_of(mesh)
    placements = placements_in(whole, mesh, form)
    if value.device_mesh == whole and [*value.placements] == placements and not (form and form.shards_rows):
        return value.to_local()
    local = value.redistribute(whole, _unsharded(placements, whole, mesh)).to_local()
    chunk = chunk_of(slot, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    return local[chunk.first_row : chunk.stop_row]


def unsharded_in(value: DTensor, mesh: DeviceMesh, form: ParallelLayout) -> Tensor:
    """All that the unit shards, out of a DTensor over the mesh of tensor parallelism or the whole one."""
    if value.device_mesh == form.mesh:
        return form.local_part(value)
    whole = root_mesh_of(mesh)
    return value.redistribute(whole, _unsharded(placements_in(whole, mesh, form), whole, mesh)).to_local()


def placements_in(whole: DeviceMesh, mesh: DeviceMesh, form: ParallelLayout | None) -> list[Placement]:
    placements: list[Placement] = [Replicate() for _ in range(whole.ndim)]
    placements[_dim_in(whole, mesh)] = ShardOf(0)
    for name, placement in zip(_names_of(form.mesh), form.placements, strict=True) if form else ():
        placements[_names_of(whole).index(name)] = placement
    return placements


def _unsharded(placements: Sequence[Placement], whole: DeviceMesh, mesh: DeviceMesh) -> list[Placement]:
    dim = _dim_in(whole, mesh)
    return [Replicate() if place == dim else one for place, one in enumerate(placements)]


def _dim_in(whole: DeviceMesh, mesh: DeviceMesh) -> int:
    """The dimension that parameters are sharded over: the last one of `mesh`."""
    return whole.ndim - 1 if whole == mesh else _names_of(whole).index(_names_of(mesh)[-1])


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
    """Of a tensor; a ShardedTensor is asked for what it tells, since torch warns whoever treats it as a tensor."""
    return torch.Size(value.metadata().size) if isinstance(value, ShardedTensor) else value.shape


def dtype_of(value: Any) -> torch.dtype:
    """As `shape_of`."""
    return value.metadata().tensor_properties.dtype if isinstance(value, ShardedTensor) else value.dtype


def chunk_in(value: Any, expected: type, rank: int) -> Tensor | None:
    """What this rank holds of a ShardedTensor or DTensor; None if that is nothing.

    Raises:
        AssertionError: it is not of the type expected, or holds more than one part.
    """
    if type(value) is not expected:
        raise AssertionError(f"Expected {expected.__name__}, got {type(value)}")
    if isinstance(value, DTensor):
        return value.to_local()
    shards = value.local_shards()
    if len(shards) > 1:
        raise AssertionError(f"Expects 0 or 1 shard per rank but got {len(shards)} shards on rank {rank}.")
    return shards[0].tensor if shards else None
