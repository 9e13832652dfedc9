"""The tensors of a state whose parts ranks hold, put together: many of them by one exchange.

W = ranks that a tensor is cut over, n = elements of a rank's part of it, padding included.
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
from impl.distributed.fsdp._comm.desync.collective_order import order_checker_of
from impl.distributed.fsdp._comm.desync.monitor import GATHERED, OF_STATES
from impl.distributed.fsdp._comm.group_collectives import GroupCollectives
from impl.distributed.fsdp._comm.transport import Complete
from impl.distributed.fsdp._layout.sharded_param import leading_view, side_by_side, with_dim_size

_EXCHANGE_BYTES = 1 << 26  # of all ranks' parts together


@dataclass(frozen=True)
class _Cut:
    """A DTensor that one group of ranks has cut in one dimension, evenly unless that is the first."""

    index: int  # among the leaves of the state
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
        """Of the parts that all ranks gave, [W * n]."""
        if self.dim:
            parts = side_by_side(run, self.group.size(), self.padded_shape, self.dim)
            return parts.reshape(self.shape).contiguous()
        full = leading_view(run, self.shape)
        return full if full.numel() == run.numel() else full.clone()


def with_full_tensors(state: Any, keep: Callable[[Tensor], Tensor]) -> Any:
    """A nested state with full tensors in place of DTensors.

    DTensors stay that several dimensions of a mesh cut, or one does unevenly beyond their first dimension.

    Args:
        keep: what of a full tensor stays in the state, called before the next ones are gathered.

    Collectives: for each 64 MiB of the full tensors an all-gather; on one host, where ranks read each other's memory,
        what tells them when.
    """
    leaves, spec = tree_flatten(state)
    cuts = [cut for index, leaf in enumerate(leaves) if (cut := _cut_of(index, leaf)) is not None]
    for cut, full in itertools.chain.from_iterable(map(_gathered, _exchanges(cuts))):
        leaves[cut.index] = keep(full)
    return tree_unflatten(leaves, spec)


def _cut_of(index: int, leaf: Any) -> _Cut | None:
    if type(leaf) is not DTensor:
        return None
    local, mesh = leaf._local_tensor, leaf.device_mesh
    cutting = [number for number, one in enumerate(leaf.placements) if not isinstance(one, Replicate)]
    if len(cutting) != 1 or type(local) is not Tensor or local.device.type != mesh.device_type:
        return None
    placement: Any = leaf.placements[cutting[0]]
    ranks = mesh.size(cutting[0])
    if type(placement) is not Shard or ranks == 1 or (placement.dim and leaf.shape[placement.dim] % ranks):
        return None
    return _Cut(index, local, leaf.shape, placement.dim, mesh.get_group(cutting[0]))


def _exchanges(cuts: Sequence[_Cut]) -> list[list[_Cut]]:
    """Those that are gathered together, in the same order on all ranks."""
    found: list[list[_Cut]] = []
    filled: dict[Any, tuple[list[_Cut], int]] = {}  # the last exchange of each kind, and its bytes
    for cut in cuts:
        kind, nbytes = (cut.group, cut.local.dtype), cut.run_numel * cut.local.itemsize
        exchange, earlier = filled.get(kind, ([], _EXCHANGE_BYTES))
        if earlier + nbytes > _EXCHANGE_BYTES:
            exchange, earlier = [], 0
            found.append(exchange)
        exchange.append(cut)
        filled[kind] = exchange, earlier + nbytes
    return found


def _gathered(cuts: Sequence[_Cut]) -> list[tuple[_Cut, Tensor]]:
    group = cuts[0].group
    runs = [cut.local.new_empty(cut.run_numel) for cut in cuts]
    rows = [run.view(group.size(), -1) for run in runs]
    pairs = zip(rows, cuts, strict=True)
    mine = [leading_view(row[group.rank()], cut.local.shape) for row, cut in pairs]
    torch._foreach_copy_(mine, [cut.local for cut in cuts])
    nbytes, on_host = sum(run.nbytes for run in runs), runs[0].is_cpu

    def steps(complete: Complete) -> None:
        transport = transport_for(GroupCollectives(group), nbytes, on_host, complete)
        transport.all_gather_rows(rows, complete)

    entry = f"{GATHERED} {len(cuts)} tensors {OF_STATES}, {tuple(cuts[0].shape)} first"
    order_checker_of(group).exchange(entry, group, runs[0].device, steps)
    return [(cut, cut.unsharded(run)) for cut, run in zip(cuts, runs, strict=True)]
