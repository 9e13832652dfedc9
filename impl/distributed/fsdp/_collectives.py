"""What a unit's ranks tell each other: shards to gather, gradients to sum; dtypes and divisions with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks

from impl.distributed.fsdp._collective_order import Complete, method_of_group
from impl.distributed.fsdp._desync_monitor import GATHERED
from impl.distributed.fsdp._groups import Groups, predivide_factor
from impl.distributed.fsdp._same_host_peers import is_enough, is_over_gloo, same_host_peers_in

# From 2.13 on torch deprecates the older names, which are all that 2.11 and a group that is a mere backend have.
_all_gather = method_of_group("all_gather_single", "_allgather_base")
_reduce_scatter = method_of_group("reduce_scatter_single", "_reduce_scatter_base")
_all_reduce = method_of_group("allreduce")
all_to_all = method_of_group("all_to_all_single", "alltoall_base")

# Hooks that cast by themselves, and what they cast to. torch's own cannot run where tensors have no streams.
_LOW_PRECISION: dict[Any, torch.dtype] = {
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
_Hook = Callable[..., Any]


def all_gathered(mine: Tensor, groups: Groups, group: dist.ProcessGroup, name: str) -> Tensor:
    """What every rank's `mine` comes to, one behind the other, of the unit `name`; collectives as `all_gather_into`."""
    unsharded = mine.new_empty(mine.numel() * group.size())
    all_gather_into(unsharded, mine, groups, group, f"{GATHERED} '{name}'")
    return unsharded


def all_gather_into(
    unsharded: Tensor, mine: Tensor, groups: Groups, group: dist.ProcessGroup, entry: str
) -> None:
    """Fill `unsharded` with every rank's `mine`, one behind the other.

    Collectives: one all-gather, or what paces `SameHostPeers`.
    """
    order_checker = groups.order_checkers[group]
    if not is_enough(unsharded, group):
        order_checker.run(entry, _all_gather, group, unsharded, mine)
        return

    def steps(complete: Complete) -> None:
        peers = same_host_peers_in(group, complete)
        if peers is None:
            complete(_all_gather(group, unsharded, mine))
        else:
            peers.gather(group, unsharded, mine, complete)

    order_checker.exchange(entry, group, True, steps)


class Reduction:
    """How a unit averages gradients over its ranks; `hook` replaces torch's way by the user's."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.hook: _Hook | None = None
        self.hook_state: Any = None
        self._before = predivide_factor(groups.size)
        self._after = groups.size / self._before
        self._adds_itself = (
            groups.shard is not None and groups.shard.size() > 1 and is_over_gloo(groups.shard)
        )

    @property
    def casts_itself(self) -> bool:
        return self.hook in _LOW_PRECISION

    @torch.no_grad()
    def __call__(self, buffer: Tensor, name: str) -> Tensor:
        """Average a buffer [W * S] of the unit `name` over all ranks; this rank's shard [S] of it.

        The buffer is overwritten. The result has its dtype, and lies in the buffer itself where nothing is sharded.
        Collectives: a reduce-scatter where parameters are sharded (over gloo an all-to-all, or what paces
            `SameHostPeers`), an all-reduce where they are replicated.
        """
        entry = f"reduced '{name}'"
        if self.hook is None:
            return self._averaged(buffer, entry)
        if self.hook in _LOW_PRECISION:
            return self._averaged(buffer.to(_LOW_PRECISION[self.hook]), entry)
        for group, order_checker in self.groups.order_checkers.items():
            order_checker.note(entry, group, buffer.is_cpu)
        if self.groups.shard is None:
            self.hook(self.hook_state, buffer)
            return buffer
        output = buffer.new_empty(buffer.numel() // self.groups.shard_size)
        self.hook(self.hook_state, buffer, output)
        return output

    def _averaged(self, buffer: Tensor, entry: str) -> Tensor:
        groups = self.groups
        divisor = self._after
        if buffer.dtype is torch.float16:
            if self._before > 1:
                buffer.div_(self._before)
        else:
            # A power of two, which may as well be divided by once the elements are fewer: their exponents have room.
            divisor *= self._before
        output = buffer
        if groups.shard is not None:
            output = self._scattered_sum(buffer, groups.shard, entry)
        if groups.replicate is not None:
            groups.order_checkers[groups.replicate].run(entry, _all_reduce, groups.replicate, [output])
        if divisor > 1:
            output.div_(divisor)
        return output

    def _scattered_sum(self, buffer: Tensor, group: dist.ProcessGroup, entry: str) -> Tensor:
        """Add up the ranks' buffers; the rank's shard of the sum.

        gloo's reduce-scatter copies the buffer and reduces all of it for every rank: twice the traffic. There this rank
        adds up itself what it reads or is sent, with one rounding where buffers are in low precision.
        """
        shard = buffer.new_empty(buffer.numel() // group.size())
        order_checker = self.groups.order_checkers[group]
        if not (self._adds_itself and buffer.is_cpu):
            order_checker.run(entry, _reduce_scatter, group, shard, buffer)
            return shard

        def steps(complete: Complete) -> None:
            peers = same_host_peers_in(group, complete) if is_enough(buffer, group) else None
            if peers is not None:
                peers.scatter_sum(group, shard, buffer, complete)
                return
            parts = torch.empty_like(buffer)
            complete(all_to_all(group, parts, buffer, [], []))
            torch.sum(parts.view(group.size(), -1), 0, out=shard)

        order_checker.exchange(entry, group, True, steps)
        return shard
