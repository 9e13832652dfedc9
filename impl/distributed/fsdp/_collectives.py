"""What a unit's ranks tell each other: shards to gather, gradients to sum; dtypes and divisions with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks

from impl.distributed.fsdp._collective_order import Complete, method_of_group
from impl.distributed.fsdp._desync_monitor import GATHERED, GATHERED_ANEW
from impl.distributed.fsdp._flat_layout import FlatLayout
from impl.distributed.fsdp._flat_param import FlatParamHandle
from impl.distributed.fsdp._groups import Groups, predivide_factor
from impl.distributed.fsdp._same_host_peers import is_enough, is_over_gloo, same_host_peers_in
from impl.distributed.fsdp._unsharded_buffer import UnshardedBuffer
from impl.kernels import copy_into_, placed

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

# An unsharded buffer that is needed elsewhere is gathered in so many parts at most, each of so many bytes at least.
_PARTS = 8
_PART_BYTES = 1 << 20


@torch.no_grad()
def gather(
    handle: FlatParamHandle, unsharded: UnshardedBuffer, groups: Groups, name: str, *, is_kept: bool = False
) -> None:
    """Fill an unsharded buffer of the unit `name` from every rank's shard; anew, if it `is_kept` and its shard was
    written to.

    Collectives: one all-gather over the group that the flat parameter is sharded over, or what paces `SameHostPeers`;
        none if it is not sharded.
    """
    unsharded.allocate()
    if unsharded.aliases_shard:
        return
    written = unsharded.fill_from(handle.versions)
    shard = handle.flat_param.data
    if groups.shard is None:
        copy_into_(unsharded.flat, shard)
        return
    mine = placed(shard, unsharded.flat.device, unsharded.flat.dtype)
    how = GATHERED_ANEW if is_kept else GATHERED
    try:
        _gather_into(unsharded.flat, mine, groups, groups.shard, f"{how} '{name}'")
    except RuntimeError as error:
        if is_kept and written:
            names = ", ".join(handle.layout.slots[index].name for index in written)
            error.add_note(f"This rank gathers {name} anew since {names} of it was written to.")
        raise


@torch.no_grad()
def gathered_like(handle: FlatParamHandle, shard: Tensor, groups: Groups, name: str) -> Tensor:
    """All elements [padded_numel] of any tensor that is sharded as the flat parameter is; collectives as `gather`."""
    if groups.shard is None:
        return shard
    return _all_gathered(shard.to(handle.device), groups, groups.shard, name)


@torch.no_grad()
def gathered_in_parts(handle: FlatParamHandle, groups: Groups, name: str) -> Iterator[tuple[int, Tensor]]:
    """All elements of a flat parameter that is sharded, in runs that follow one another: where in the unsharded buffer
    each begins, and it.

    No rank has more of the buffer at a time than an eighth, unless that were less than a megabyte. Every rank has to
    take all of the runs.

    Collectives: up to eight all-gathers, as `gather`.
    """
    shard, layout, group = handle.flat_param.data, handle.layout, groups.shard
    assert group is not None
    fewest = -(-_PART_BYTES // (handle.dtype.itemsize * layout.world))
    width = max(-(-layout.shard_numel // _PARTS), fewest, 1)
    for first in range(0, layout.shard_numel, width):
        part = _all_gathered(shard[first : first + width].to(handle.device), groups, group, name)
        for rank, run in enumerate(part.view(layout.world, -1)):
            yield rank * layout.shard_numel + first, run


def _all_gathered(mine: Tensor, groups: Groups, group: dist.ProcessGroup, name: str) -> Tensor:
    unsharded = mine.new_empty(mine.numel() * group.size())
    _gather_into(unsharded, mine, groups, group, f"{GATHERED} '{name}'")
    return unsharded


def _gather_into(
    unsharded: Tensor, mine: Tensor, groups: Groups, group: dist.ProcessGroup, entry: str
) -> None:
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


def copy_in(layout: FlatLayout, grads: Sequence[Tensor | None], views: list[Tensor], buffer: Tensor) -> None:
    """Copy gradients into a buffer [padded_numel] that `views` lie over, casting; zeros where there is none."""
    present = [grad for grad in grads if grad is not None]
    if len(present) == len(views):
        torch._foreach_copy_(views, present)
    else:
        targets = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
        torch._foreach_copy_(targets, present)
        torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])
    for start, stop in layout.gaps:
        buffer[start:stop].zero_()


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
    def __call__(self, buffer: Tensor, shard_numel: int, name: str) -> Tensor:
        """Average a buffer [padded_numel] of the unit `name` over all ranks; this rank's shard [shard_numel] of it.

        The buffer is overwritten. The result has its dtype, and lies in the buffer itself where nothing is sharded.
        Collectives: a reduce-scatter where parameters are sharded (over gloo an all-to-all, or what paces
            `SameHostPeers`), an all-reduce where they are replicated.
        """
        entry = f"reduced '{name}'"
        if self.hook is None:
            return self._averaged(buffer, shard_numel, entry)
        if self.hook in _LOW_PRECISION:
            return self._averaged(buffer.to(_LOW_PRECISION[self.hook]), shard_numel, entry)
        for group, order_checker in self.groups.order_checkers.items():
            order_checker.note(entry, group, buffer.is_cpu)
        if self.groups.shard is None:
            self.hook(self.hook_state, buffer)
            return buffer
        output = buffer.new_empty(shard_numel)
        self.hook(self.hook_state, buffer, output)
        return output

    def _averaged(self, buffer: Tensor, shard_numel: int, entry: str) -> Tensor:
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
            output = self._scattered_sum(buffer, shard_numel, groups.shard, entry)
        if groups.replicate is not None:
            groups.order_checkers[groups.replicate].run(entry, _all_reduce, groups.replicate, [output])
        if divisor > 1:
            output.div_(divisor)
        return output

    def _scattered_sum(
        self, buffer: Tensor, shard_numel: int, group: dist.ProcessGroup, entry: str
    ) -> Tensor:
        """Add up the ranks' buffers; the rank's shard of the sum.

        gloo's reduce-scatter copies the buffer and reduces all of it for every rank: twice the traffic. There this rank
        adds up itself what it reads or is sent, with one rounding where buffers are in low precision.
        """
        shard = buffer.new_empty(shard_numel)
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
            torch.sum(parts.view(group.size(), shard_numel), 0, out=shard)

        order_checker.exchange(entry, group, True, steps)
        return shard
