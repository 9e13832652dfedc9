"""Process groups that parameters are sharded over, and norms and flags combined over their ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from impl.kernels import PLAIN_TYPES, to_device

_registered: Any = WeakIdKeyDictionary()
_CURE = "whose ranks have no one process group; call unscale_, clip_grad_norm_, step and update instead"


def register_shard_groups(parameter: Tensor, *groups: dist.ProcessGroup) -> None:
    """Record that `parameter` is one rank's shard of a parameter that is sharded over these groups."""
    _registered[parameter] = groups


def is_distributed(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing `torch.distributed.tensor`, which takes half a second."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or `tensor`, as a plain tensor at the same address."""
    local: Any = tensor
    if is_distributed(tensor):
        return local._local_tensor
    return local.data if type(tensor) not in PLAIN_TYPES and isinstance(tensor, Parameter) else tensor


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the process group that `parameter` is sharded over, or None if this rank holds all of it.

    Raises:
        NotImplementedError: it is sharded over several groups, along several dimensions of a mesh; or it is a partial
            DTensor.
    """
    if not is_distributed(parameter):
        groups = _registered.get(parameter, ())
        if len(groups) > 1:
            raise NotImplementedError(
                f"a parameter is sharded over {len(groups)} groups of ranks, for data and for tensor parallelism, and "
                f"{_CURE}"
            )
        return groups[0] if groups else None
    dtensor: Any = parameter
    if any(placement.is_partial() for placement in dtensor.placements):
        raise NotImplementedError("a DTensor with partial sums is no parameter that can be stepped")
    sharded = [dim for dim, placement in enumerate(dtensor.placements) if not placement.is_replicate()]
    if len(sharded) > 1:
        raise NotImplementedError(
            f"a DTensor with placements {dtensor.placements} is sharded along {len(sharded)} dimensions of its mesh, "
            f"{_CURE}"
        )
    return dtensor.device_mesh.get_group(sharded[0]) if sharded else None


def shard_groups(parameters: Iterable[Tensor]) -> list[dist.ProcessGroup]:
    """Return the groups that these parameters are sharded over, in order of appearance, which all ranks share."""
    listed = list(parameters)
    if not _registered and PLAIN_TYPES.issuperset(map(type, listed)):
        return []
    groups = dict.fromkeys(map(shard_group, listed))
    return [group for group in groups if group is not None]


@dataclass(frozen=True)
class Norms:
    """0-dim norms of one order: one of the replicated gradients, and one for each shard group."""

    order: float
    replicated: Tensor  # norm of the gradients that each rank holds all of
    sharded: dict[dist.ProcessGroup, Tensor]  # norms of this rank's shards

    def gathered(self, among: dist.ProcessGroup | None, flag: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of all gradients, with each element counted once, and the largest flag of all ranks.

        Both are 0-dim: the norm is f32 or f64, the flag f64.

        Collectives: one all-gather in `among`, which includes all groups, of one number and one more for each group.
        """
        numbers = torch.stack(
            [flag.to(torch.float64), *(norm.to(torch.float64) for norm in self.sharded.values())]
        )
        numbers_of_ranks = all_gather_numbers(numbers, among)
        norms = [self.replicated.to(torch.float64)]
        for column, group in enumerate(self.sharded, start=1):
            group_norms, ranks = numbers_of_ranks[:, column], _ranks_in(among, group)
            if ranks != [*range(len(group_norms))]:
                # Indexing with a list of ranks would synchronise with the device.
                norm_of_ranks = group_norms.unbind()
                group_norms = torch.stack([norm_of_ranks[rank] for rank in ranks])
            norms.append(self._combined(group_norms.contiguous()))
        wide = torch.float64 if self.replicated.dtype is torch.float64 else torch.float32
        return self._combined(torch.stack(norms)).to(wide), numbers_of_ranks[:, 0].amax()

    def _combined(self, norms: Tensor) -> Tensor:
        # Norms of order 0 are counts, so add them.
        return torch.linalg.vector_norm(norms, self.order or 1.0)


def all_gather_numbers(numbers: Tensor, among: dist.ProcessGroup | None) -> Tensor:
    """Return every rank's `numbers`, one row for each rank. They are sent from a device that the group supports."""
    local = to_device(numbers, _collective_device(among, numbers.device))
    gathered = local.new_empty((dist.get_world_size(among), len(local)))
    dist.all_gather([*gathered.unbind()], local, group=among)
    return to_device(gathered, numbers.device)


def _collective_device(among: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    group = dist.group.WORLD if among is None else among
    # Not every group has this attribute.
    types = [supported.type for supported in getattr(group, "_device_types", ())]
    return torch.device(types[0]) if types and device.type == "cpu" and "cpu" not in types else device


def _ranks_in(among: dist.ProcessGroup | None, group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of `group` as numbered in `among`, which is the default group if None."""
    among = dist.group.WORLD if among is None else among
    assert among is not None
    if group is among:
        return [*range(group.size())]
    try:
        numbers = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(among))}
        return [numbers[rank] for rank in dist.get_process_group_ranks(group)]
    except KeyError as error:
        [missing] = error.args
        who = f"rank {missing}" if isinstance(missing, int) else "a rank of a group that torch does not know"
        raise RuntimeError(
            f"{who} holds a shard of a parameter, and is not in the process group that decides on the step; give the "
            "ShardedGradScaler a process_group of all ranks that hold shards"
        ) from None
