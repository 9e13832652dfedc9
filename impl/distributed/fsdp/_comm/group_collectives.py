"""The collectives of a process group, issued by its own methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.distributed.fsdp._comm.transport import Complete


class GroupMethod:
    """Collective that is issued by a method of the group itself: the first of `names` that the group has.

    The functions of torch.distributed check and log values that are fixed here, which takes as long as the rest of a
    unit's step. A group that is written in Python may have no other methods.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, group: dist.ProcessGroup, *arguments: object) -> dist.Work:
        name = next((name for name in self.names if hasattr(group, name)), self.names[0])
        return getattr(group, name)(*map(_as_real, arguments))


def _as_real(argument: object) -> Any:
    """View complex tensors as real ones, also in lists.

    Backends lack complex dtypes, and sums have the same components.
    """
    if isinstance(argument, list):
        return [_as_real(entry) for entry in argument]
    return (
        torch.view_as_real(argument) if isinstance(argument, Tensor) and argument.is_complex() else argument
    )


# torch 2.13 deprecates the older names. torch 2.11, and a group that is only a backend, have no others.
_all_gather = GroupMethod("all_gather_single", "_allgather_base")
_reduce_scatter = GroupMethod("reduce_scatter_single", "_reduce_scatter_base")
all_to_all = GroupMethod("all_to_all_single", "alltoall_base")
all_reduce = GroupMethod("allreduce")


class GroupCollectives:
    """Transport by a group's own collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.is_over_gloo = is_over_gloo(group, torch.device("cpu"))

    def all_gather(self, output: Tensor, shard: Tensor, complete: Complete) -> None:
        complete(_all_gather, self.group, output, shard)

    def all_gather_rows(self, outputs: Sequence[Tensor], complete: Complete) -> None:
        rank, sizes = self.group.rank(), [output.shape[1] for output in outputs]
        packed = outputs[0]
        if len(outputs) > 1:
            packed = packed.new_empty(len(packed), sum(sizes))
            torch.cat([output[rank] for output in outputs], out=packed[rank])
        self.all_gather(packed.view(-1), packed[rank], complete)
        if len(outputs) > 1:
            torch.split_with_sizes_copy(packed, sizes, dim=1, out=list(outputs))

    def reduce_scatter(self, shard: Tensor, buffer: Tensor, complete: Complete) -> None:
        """Reduce-scatter by the group, or over gloo by an all-to-all and a local sum.

        gloo's own reduce-scatter copies the buffer and reduces all of it for every rank: twice the traffic. The local
        sum rounds low precision only once.
        """
        if not (self.is_over_gloo and buffer.is_cpu):
            complete(_reduce_scatter, self.group, shard, buffer)
            return
        shards = torch.empty_like(buffer)
        complete(all_to_all, self.group, shards, buffer, [], [])
        torch.sum(shards.view(self.group.size(), -1), 0, out=shard)


def is_over_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether gloo carries the group's collectives on tensors of `device`."""
    try:
        return group._get_backend(device).name() == "gloo"
    except (RuntimeError, AttributeError):
        return False  # no backend for the device, or without a name


def blocks_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether waiting for a collective on tensors of `device` blocks the host, not only a stream.

    gloo copies tensors of a device to the host and back, and its wait blocks the host until they are there.
    """
    return device.type == "cpu" or is_over_gloo(group, device)
