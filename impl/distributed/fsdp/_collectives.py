"""What a unit's ranks tell each other: shards to gather, gradients to sum; dtypes and divisions with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks

from impl.distributed.fsdp._desync.monitor import GATHERED
from impl.distributed.fsdp._groups import Groups, predivide_factor
from impl.distributed.fsdp._transport.choosing import transport_for
from impl.distributed.fsdp._transport.collectives import method_of_group
from impl.distributed.fsdp._transport.transport import Complete

_all_reduce = method_of_group("allreduce")

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

    def steps(complete: Complete) -> None:
        transport_for(groups.collectives[group], unsharded, complete).all_gather(unsharded, mine, complete)

    groups.order_checkers[group].exchange(entry, group, unsharded.is_cpu, steps)


class Reduction:
    """How a unit averages gradients over its ranks; `hook` replaces torch's way by the user's."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.hook: _Hook | None = None
        self.hook_state: Any = None
        self._before = predivide_factor(groups.size)
        self._after = groups.size / self._before

    @property
    def casts_itself(self) -> bool:
        return self.hook in _LOW_PRECISION

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
        """Add up the ranks' buffers; the rank's shard of the sum."""
        shard = buffer.new_empty(buffer.numel() // group.size())

        def steps(complete: Complete) -> None:
            transport_for(self.groups.collectives[group], buffer, complete).reduce_scatter(
                shard, buffer, complete
            )

        self.groups.order_checkers[group].exchange(entry, group, buffer.is_cpu, steps)
        return shard
