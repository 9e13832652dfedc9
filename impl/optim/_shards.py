"""Which ranks hold the other parts of a parameter, and what they make of numbers that each found in its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from impl.kernels import PLAIN_TYPES, placed

_registered: Any = WeakIdKeyDictionary()
_CURE = "whose ranks have no one process group; call unscale_, clip_grad_norm_, step and update instead"


def register_shard_groups(parameter: Tensor, *groups: dist.ProcessGroup) -> None:
    """Note that `parameter` is one rank's part of what all ranks of a group, or of several, hold together."""
    _registered[parameter] = groups


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor; asked without importing what defines them, which takes half a second."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`, as a plain tensor at the same address."""
    part: Any = tensor
    if is_distributed(tensor):
        return part._local_tensor
    return part.data if type(tensor) not in PLAIN_TYPES and isinstance(tensor, Parameter) else tensor


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold `parameter` together, each element once; None if this rank holds all of it.

    Raises:
        NotImplementedError: several groups hold it, as it is sharded along several dimensions of a mesh; or it is a
            DTensor that has sums to take.
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
    """The groups that hold these together, in order of appearance, which is the same on all ranks."""
    listed = list(parameters)
    if not _registered and PLAIN_TYPES.issuperset(map(type, listed)):
        return []
    groups = dict.fromkeys(map(shard_group, listed))
    return [group for group in groups if group is not None]


@dataclass(frozen=True)
class Norms:
    """Of one order, 0-dim and on one device."""

    order: float
    replicated: Tensor  # of what each rank holds all of
    sharded: dict[dist.ProcessGroup, Tensor]  # of this rank's part of what a group holds

    def gathered(self, among: dist.ProcessGroup | None, flag: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of all, each element counted once, and the largest of the ranks' flags; f32 and f64, 0-dim.

        Collectives: one all-gather of a number for each group and one more, in `among`, to which all groups belong.
        """
        mine = torch.stack(
            [flag.to(torch.float64), *(norm.to(torch.float64) for norm in self.sharded.values())]
        )
        everyones = exchanged(mine, among)
        norms = [self.replicated.to(torch.float64)]
        for column, group in enumerate(self.sharded, start=1):
            found, ranks = everyones[:, column], _ranks_in(among, group)
            if ranks != [*range(len(found))]:
                # Not by a list of rows, for which a device would wait for the host.
                numbers = found.unbind()
                found = torch.stack([numbers[rank] for rank in ranks])
            norms.append(self._joined(found.contiguous()))
        wide = torch.float64 if self.replicated.dtype is torch.float64 else torch.float32
        return self._joined(torch.stack(norms)).to(wide), everyones[:, 0].amax()

    def _joined(self, norms: Tensor) -> Tensor:
        # Norms of order 0 are counts, which add up.
        return torch.linalg.vector_norm(norms, self.order or 1.0)


def exchanged(numbers: Tensor, among: dist.ProcessGroup | None) -> Tensor:
    """Every rank's `numbers`, a row a rank; sent from the device where the group takes none from the host."""
    mine = placed(numbers, _place_in(among, numbers.device))
    everyones = mine.new_empty((dist.get_world_size(among), len(mine)))
    dist.all_gather([*everyones.unbind()], mine, group=among)
    return placed(everyones, numbers.device)


def _place_in(among: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    group = dist.group.WORLD if among is None else among
    kinds = [place.type for place in getattr(group, "_device_types", ())]  # some groups do not tell
    return torch.device(kinds[0]) if kinds and device.type == "cpu" and "cpu" not in kinds else device


def _ranks_in(among: dist.ProcessGroup | None, group: dist.ProcessGroup) -> list[int]:
    """The numbers that the ranks of `group` have in `among`, which is the default group if it is None."""
    among = dist.group.WORLD if among is None else among
    assert among is not None
    if group is among:
        return [*range(group.size())]
    try:
        numbers = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(among))}
        return [numbers[rank] for rank in dist.get_process_group_ranks(group)]
    except KeyError as error:
        [missing] = error.args
        who = (
            f"rank {missing}" if isinstance(missing, int) else "a rank of a group that torch was not told of"
        )
        raise RuntimeError(
            f"{who} holds a part of a parameter, and is not in the process group that decides on the step; give the "
            "ShardedGradScaler a process_group of all ranks that hold parts"
        ) from None
