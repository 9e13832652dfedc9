"""Full tensors of a sharded state, many of them gathered by one exchange.

W = ranks that a tensor is sharded over, n = elements of a rank's shard, padding included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from impl.distributed.fsdp._comm.choosing import transport_for
from impl.distributed.fsdp._comm.desync.collective_order import allow_saving, order_checker_of
from impl.distributed.fsdp._comm.desync.monitor import GATHERED, OF_STATES
from impl.distributed.fsdp._comm.group_collectives import GroupCollectives
from impl.distributed.fsdp._comm.transport import Complete
from impl.distributed.fsdp._layout.sharded_param import leading_view, side_by_side, with_dim_size

_EXCHANGE_BYTES = 1 << 26  # bytes of all ranks' shards together


@dataclass(frozen=True)
class _ShardedTensor:
    """DTensor that is sharded over one group of ranks in one dimension, evenly unless it is the first dimension."""

    index: int  # index among the leaves of the state
    local: Tensor
    shape: torch.Size
    dim: int
    group: dist.ProcessGroup

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return with_dim_size(self.shape, self.dim, -(-self.shape[self.dim] // self.group.size()))

    @property
    def run_numel(self) -> int:
        return self.group.size() * prod(self.padded_shape)

    def unsharded(self, run: Tensor) -> Tensor:
        """Return the full tensor from the shards of all ranks, [W * n]."""
        if self.dim:
            shards = side_by_side(run, self.group.size(), self.padded_shape, self.dim)
            return shards.reshape(self.shape).contiguous()
        full = leading_view(run, self.shape)
        return full if full.numel() == run.numel() else full.clone()


def with_full_tensors(state: object, keep: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested state with full tensors instead of DTensors.

    DTensors that several mesh dimensions shard, or that are sharded unevenly in a later dimension, stay unchanged.

    Args:
        keep: returns the replacement of a full tensor in the state. Called before the next tensors are gathered.

    Collectives: an all-gather for each 64 MiB of full tensors. On one host ranks may read each other's memory instead,
        paced by small all-reduces.
    """
    leaves, spec = tree_flatten(state)
    tensors = [
        tensor for index, leaf in enumerate(leaves) if (tensor := _sharded_tensor_of(index, leaf)) is not None
    ]
    for tensor, full in itertools.chain.from_iterable(map(_gather, _exchanges(tensors))):
        leaves[tensor.index] = keep(full)
    return tree_unflatten(leaves, spec)


def _sharded_tensor_of(index: int, leaf: object) -> _ShardedTensor | None:
    if type(leaf) is not DTensor:
        return None
    local, mesh = leaf._local_tensor, leaf.device_mesh
    sharding_dims = [
        number for number, placement in enumerate(leaf.placements) if not isinstance(placement, Replicate)
    ]
    if len(sharding_dims) != 1 or type(local) is not Tensor or local.device.type != mesh.device_type:
        return None
    placement: Any = leaf.placements[sharding_dims[0]]
    ranks = mesh.size(sharding_dims[0])
    if type(placement) is not Shard or ranks == 1 or (placement.dim and leaf.shape[placement.dim] % ranks):
        return None
    return _ShardedTensor(index, local, leaf.shape, placement.dim, mesh.get_group(sharding_dims[0]))


def _exchanges(tensors: Sequence[_ShardedTensor]) -> list[list[_ShardedTensor]]:
    """Return groups of DTensors that are gathered together, in the same order on all ranks."""
    exchanges: list[list[_ShardedTensor]] = []
    # The last exchange of each group and dtype, and its bytes.
    filled: dict[Any, tuple[list[_ShardedTensor], int]] = {}
    for tensor in tensors:
        key, nbytes = (tensor.group, tensor.local.dtype), tensor.run_numel * tensor.local.itemsize
        exchange, earlier = filled.get(key, ([], _EXCHANGE_BYTES))
        if earlier + nbytes > _EXCHANGE_BYTES:
            exchange, earlier = [], 0
            exchanges.append(exchange)
        exchange.append(tensor)
        filled[key] = exchange, earlier + nbytes
    return exchanges


@allow_saving()
def _gather(tensors: Sequence[_ShardedTensor]) -> list[tuple[_ShardedTensor, Tensor]]:
    group = tensors[0].group
    runs = [tensor.local.new_empty(tensor.run_numel) for tensor in tensors]
    rows = [run.view(group.size(), -1) for run in runs]
    pairs = zip(rows, tensors, strict=True)
    own_rows = [leading_view(row[group.rank()], tensor.local.shape) for row, tensor in pairs]
    torch._foreach_copy_(own_rows, [tensor.local for tensor in tensors])
    nbytes, on_host = sum(run.nbytes for run in runs), runs[0].is_cpu

    def steps(complete: Complete) -> None:
        transport = transport_for(GroupCollectives(group), nbytes, on_host, complete)
        transport.all_gather_rows(rows, complete)

    entry = f"{GATHERED} {len(tensors)} tensors {OF_STATES}, {tuple(tensors[0].shape)} first"
    order_checker_of(group).exchange(entry, group, runs[0].device, steps)
    return [(tensor, tensor.unsharded(run)) for tensor, run in zip(tensors, runs, strict=True)]
