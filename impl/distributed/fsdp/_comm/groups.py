"""Process groups that a unit's parameters are sharded over and replicated over."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from impl.distributed.fsdp._comm.desync.collective_order import CollectiveOrderChecker, order_checker_of
from impl.distributed.fsdp._comm.group_collectives import GroupCollectives
from impl.distributed.fsdp.api import ShardingStrategy

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass(frozen=True)
class Groups:
    """Process groups of a unit.

    `shard`: the ranks that share one copy of the parameters. `replicate`: the ranks that hold the same shard.
        `parallel`: the tensor-parallel groups. Each of their ranks has another tensor to shard.
    """

    shard: dist.ProcessGroup | None  # absent if nothing is sharded
    replicate: dist.ProcessGroup | None
    # Ranks within `shard` that gather post-forward shards for a backward; None: all.
    post_forward: dist.ProcessGroup | None = None
    parallel: tuple[dist.ProcessGroup, ...] = ()

    @property
    def shard_size(self) -> int:
        return self.shard.size() if self.shard is not None else 1

    @property
    def shard_rank(self) -> int:
        return self.shard.rank() if self.shard is not None else 0

    @property
    def members(self) -> tuple[dist.ProcessGroup, ...]:
        """All groups whose ranks hold a part of the parameters."""
        data = (group for group in (self.shard, self.replicate) if group is not None)
        return (*data, *self.parallel)

    @property
    def are_hybrid(self) -> bool:
        """Whether parameters are sharded over some ranks and replicated over others."""
        return self.shard is not None and self.replicate is not None

    @property
    def size(self) -> int:
        """Number of ranks that a gradient is averaged over."""
        return self.shard_size * (self.replicate.size() if self.replicate is not None else 1)

    @cached_property
    def collectives(self) -> dict[dist.ProcessGroup, GroupCollectives]:
        return {group: GroupCollectives(group) for group in self.order_checkers}

    @cached_property
    def order_checkers(self) -> dict[dist.ProcessGroup, CollectiveOrderChecker]:
        """Checkers of the collectives' order, by group."""
        return {
            group: order_checker_of(group)
            for group in (self.shard, self.replicate, self.post_forward)
            if group is not None
        }


def predivide_factor(size: float) -> float:
    """Return the factor to divide by before summing over `size` ranks: a power of two near its square root.

    The rest is divided afterwards, so that the sum does not overflow and its terms do not underflow.
    """
    factor = 1
    while size % factor == 0 and size / factor > factor:
        factor *= 2
    return float(factor)


def groups_from_strategy(
    strategy: ShardingStrategy,
    group: dist.ProcessGroup,
    between: dist.ProcessGroup | None,
    parallel: tuple[dist.ProcessGroup, ...],
) -> Groups:
    """Return the groups that a unit shards and replicates over. Groups of one rank are left out.

    `between` is the group that hybrid strategies replicate over.
    """
    several = group if group.size() > 1 else None
    if between is not None:
        return Groups(several, between if between.size() > 1 else None, parallel=parallel)
    if strategy is ShardingStrategy.NO_SHARD:
        return Groups(None, several, parallel=parallel)
    return Groups(several, None, parallel=parallel)


def effective_strategy(strategy: ShardingStrategy | None, world_size: int) -> ShardingStrategy:
    """Return the strategy that is used for `world_size` ranks. Warn like torch if it differs, or is NO_SHARD."""
    if world_size == 1:
        if strategy is not ShardingStrategy.NO_SHARD:
            warnings.warn(
                f"FSDP is switching to use `NO_SHARD` instead of {strategy or ShardingStrategy.FULL_SHARD} since the "
                "world size is 1.",
                stacklevel=3,
            )
        return ShardingStrategy.NO_SHARD
    if strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` "
            "instead.",
            FutureWarning,
            stacklevel=3,
        )
    return strategy or ShardingStrategy.FULL_SHARD


def choose_process_groups(
    process_group: Any,
    strategy: ShardingStrategy | None,
    has_policy: bool,
    device_mesh: DeviceMesh | None,
    device: torch.device,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the group that parameters are sharded over, and for hybrid strategies the one that replicates.

    Raises:
        ValueError: both a group and a mesh are passed; a hybrid strategy has neither, nor a policy; or the arguments
            do not fit the strategy.
    Collectives: creates process groups for a hybrid strategy without any; all ranks must call it.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    if strategy not in HYBRID:
        if device_mesh is not None:
            return device_mesh.get_group(mesh_dim=0), None
        return process_group if process_group is not None else _default_group(), None
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(f"Expected device_mesh to have ndim=2 but got {device_mesh.ndim}")
        return device_mesh.get_group(mesh_dim=1), device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        if not _is_pair(process_group):
            raise ValueError(
                "Expected process_group to be passed in as either None or "
                f"Tuple[dist.ProcessGroup, dist.ProcessGroup] but got {type(process_group)}"
            )
        return process_group
    if not has_policy:
        raise ValueError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        )
    return _by_host(device)


def _default_group() -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    return dist.group.WORLD


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, tuple) and len(value) == 2 and all(isinstance(g, dist.ProcessGroup) for g in value)
    )


def _by_host(device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Shard inside each host, replicate between hosts; hosts have as many ranks as devices."""
    width = 1 if device.type == "cpu" else torch.accelerator.device_count()
    inside, _ = dist.new_subgroups(width)
    world, rank = dist.get_world_size(), dist.get_rank()
    between: dist.ProcessGroup | None = None
    for first in range(width):
        group = dist.new_group(list(range(first, world, width)))
        if isinstance(group, dist.ProcessGroup) and rank % width == first:
            between = group
    assert isinstance(inside, dist.ProcessGroup)
    assert between is not None
    return inside, between
