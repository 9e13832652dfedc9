"""What a unit's ranks tell each other: shards to gather, gradients to sum; dtypes and divisions with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks

from impl.distributed.fsdp._comm.choosing import transport_for
from impl.distributed.fsdp._comm.desync.collective_order import order_checker_of
from impl.distributed.fsdp._comm.desync.monitor import DIVIDED, GATHERED, REDUCED, WITH
from impl.distributed.fsdp._comm.group_collectives import GroupCollectives, all_reduce
from impl.distributed.fsdp._comm.groups import Groups, predivide_factor
from impl.distributed.fsdp._comm.transport import Complete

# Hooks that cast by themselves, and what they cast to. torch's own cannot run where tensors have no streams.
_LOW_PRECISION: dict[Any, torch.dtype] = {
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
_Hook = Callable[..., Any]
# In which torch has the collectives divide.
_DIVIDED = (torch.float32, torch.bfloat16)


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
        transport = transport_for(groups.collectives[group], unsharded.nbytes, unsharded.is_cpu, complete)
        transport.all_gather(unsharded, mine, complete)

    groups.order_checkers[group].exchange(entry, group, unsharded.device, steps)


def all_gather_rows(rows: Sequence[Tensor], groups: Groups, group: dist.ProcessGroup, entry: str) -> None:
    """Fill each of several [W, n] of one dtype with every rank's row; this rank's is there.

    Collectives: one all-gather, or what paces `SameHostPeers`.
    """
    nbytes, on_host = sum(one.nbytes for one in rows), rows[0].is_cpu

    def steps(complete: Complete) -> None:
        transport = transport_for(groups.collectives[group], nbytes, on_host, complete)
        transport.all_gather_rows(rows, complete)

    groups.order_checkers[group].exchange(entry, group, rows[0].device, steps)


@dataclass(frozen=True)
class Scattered:
    """A rank's shard of a sum over the ranks that parameters are sharded over."""

    output: Tensor  # [S]
    entry: str  # name of the reduction, which ranks compare
    divisor: float = 1.0  # not applied yet
    is_reduced: bool = False  # a hook has averaged it over all ranks


class Reduction:
    """How a unit averages gradients over its ranks; `hook` replaces torch's way by the user's.

    Args:
        sharded_with: what all ranks must have alike, where it is not the default; asked for when it is compared.
    """

    def __init__(self, groups: Groups, sharded_with: Callable[[], str]) -> None:
        self.groups = groups
        self._sharded_with = sharded_with
        self._introduces = {GATHERED, REDUCED}  # what has not come yet: the first of each says more
        self.hook: _Hook | None = None
        self.hook_state: Any = None
        self.divide_factor: float | None = None  # instead of the number of ranks
        self.scatters_over: dist.ProcessGroup | None = (
            None  # instead of the group that parameters are gathered in
        )
        self.comm: Any = None  # a reduce-scatter of the user's own: `allocate`, and a call
        self.on_reduced: Callable[[Tensor], None] | None = None  # is given what is reduced
        self.sums_alone = False  # no collective divides: neither a hook nor `comm` meets an average
        self.defers_all_reduce = False  # replicas add up what they have scattered
        self.without = ""  # as an entry says it: parameters of the unit that have no gradients here
        self.partial: Tensor | None = None  # [S], of the reductions whose all-reduce was put off

    @property
    def casts_itself(self) -> bool:
        return self.hook in _LOW_PRECISION

    def entry(self, what: str, name: str) -> str:
        """As ranks compare it: the first gather and the first reduction say what else than defaults they have."""
        entry = f"{what} '{name}'"
        if what not in self._introduces:
            return entry
        self._introduces.remove(what)
        said = self._sharded_with()
        return f"{entry}{WITH}{said}" if said else entry

    def scatter(self, buffer: Tensor, name: str) -> Scattered | None:
        """Begin to average a buffer [W * S] of the unit `name` over all ranks.

        Return this rank's shard [S] for `finish`, or None if its all-reduce is put off. The buffer is overwritten. The
        shard is the buffer itself where nothing is sharded.
        Collectives: a reduce-scatter where parameters are sharded (over gloo an all-to-all, or what paces
            `SameHostPeers`).
        """
        factor = self.divide_factor
        divided = "" if factor is None or factor == self.groups.size else f"{DIVIDED}{float(factor)}"
        entry = self.entry(REDUCED, name) + divided + self.without
        if self.hook is None:
            return self._scattered_sum(buffer, entry)
        if self.hook in _LOW_PRECISION:
            return self._scattered_sum(buffer.to(_LOW_PRECISION[self.hook]), entry)
        self.note(entry, buffer.device)
        if self.groups.shard is None:
            self.hook(self.hook_state, buffer)
            return Scattered(buffer, entry, is_reduced=True)
        output = buffer.new_empty(buffer.numel() // self.groups.shard_size)
        self.hook(self.hook_state, buffer, output)
        return Scattered(output, entry, is_reduced=True)

    def finish(self, scattered: Scattered) -> Tensor:
        """Return the average [S] over all ranks, in the memory that `scatter` returned.

        Collectives: an all-reduce where parameters are replicated.
        """
        output, divisor, replicate = scattered.output, scattered.divisor, self.groups.replicate
        if scattered.is_reduced:
            return output
        if replicate is not None:
            self.groups.order_checkers[replicate].run(scattered.entry, all_reduce, replicate, [output])
        if self.on_reduced is not None:
            early = self._divisor_before_hook(divisor, output.dtype)
            self.on_reduced(output.div_(early))
            divisor /= early
        if divisor != 1:
            output.div_(divisor)
        return output

    def note(self, entry: str, device: torch.device) -> None:
        """Have the ranks compare what this one does where it issues no collective itself."""
        for group, order_checker in self.groups.order_checkers.items():
            order_checker.note(entry, group, device)

    def _scattered_sum(self, buffer: Tensor, entry: str) -> Scattered | None:
        groups = self.groups
        divisor = float(groups.size) if self.divide_factor is None else self.divide_factor
        if (
            buffer.dtype is torch.float16
        ):  # elsewhere exponents have room to divide once the elements are fewer
            before = predivide_factor(divisor)
            divisor /= before
            if before > 1:
                buffer.div_(before)
        output = buffer
        if groups.shard is not None:
            group = self.scatters_over or groups.shard
            averages = self.comm is not None and self._averages(buffer.dtype, group.size())
            output = self._scattered(
                buffer, group, entry, dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
            )
            divisor /= group.size() if averages else 1
        if groups.replicate is not None:
            earlier, self.partial = self.partial, None
            if earlier is not None:
                # Gradients of any dtype may have come in a narrower one.
                output = earlier.add_(output) if earlier.dtype is output.dtype else earlier + output
            if self.defers_all_reduce:
                # The buffer is COMPUTE's memory, and kept no longer than its own reduction.
                self.partial = output.clone() if output is buffer else output
                return None
        return Scattered(output, entry, divisor)

    def _averages(self, dtype: torch.dtype, ranks: int) -> bool:
        """Whether a reduce-scatter of the user's own is told to, as torch tells it."""
        return dtype in _DIVIDED and not self.sums_alone and self.divide_factor in (None, ranks)

    def _divisor_before_hook(self, divisor: float, dtype: torch.dtype) -> float:
        """By what a sum is divided for a hook, which in some dtypes is given the average, as torch's is."""
        if dtype in _DIVIDED:
            return 1.0 if self.sums_alone else divisor
        return 1.0 if dtype is torch.float16 else predivide_factor(divisor)

    def _scattered(self, buffer: Tensor, group: dist.ProcessGroup, entry: str, op: Any) -> Tensor:
        """The rank's shard of the sum of the ranks' buffers, or of their average where the user's own is told so."""
        numel = buffer.numel() // group.size()
        if self.comm is not None:
            shard = self.comm.allocate((numel,), dtype=buffer.dtype, device=buffer.device)
            self.comm(output_tensor=shard, input_tensor=buffer, group=group, op=op)
            return shard
        shard = buffer.new_empty(numel)

        collectives = self.groups.collectives.get(group) or GroupCollectives(group)

        def steps(complete: Complete) -> None:
            transport = transport_for(collectives, buffer.nbytes, buffer.is_cpu, complete)
            transport.reduce_scatter(shard, buffer, complete)

        order_checker_of(group).exchange(entry, group, buffer.device, steps)
        return shard
