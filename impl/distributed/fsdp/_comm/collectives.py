"""Collectives of a unit's ranks: gathers of shards and sums of gradients, with their dtypes and divisors.

W = ranks that parameters are sharded over, S = elements of a rank's shard. An *entry* is the name of a collective, such
as `gathered 'blocks.1'`, which the ranks compare (`desync/collective_order.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
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

# Hooks that cast by themselves, and the dtypes that they cast to. torch's own hooks cannot run if tensors have no
# streams.
_LOW_PRECISION: dict[Any, torch.dtype] = {
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
_Hook = Callable[..., Any]
# Dtypes in which torch lets collectives divide.
_AVERAGED_DTYPES = (torch.float32, torch.bfloat16)


def all_gathered(shard: Tensor, groups: Groups, group: dist.ProcessGroup, name: str) -> Tensor:
    """Return every rank's `shard` of the unit `name`, concatenated in rank order.

    Collectives: the same as `all_gather_into`.
    """
    unsharded = shard.new_empty(shard.numel() * group.size())
    all_gather_into(unsharded, shard, groups, group, f"{GATHERED} '{name}'")
    return unsharded


def all_gather_into(
    unsharded: Tensor, shard: Tensor, groups: Groups, group: dist.ProcessGroup, entry: str
) -> None:
    """Fill `unsharded` with every rank's `shard`, concatenated in rank order.

    Collectives: one all-gather, or the all-reduces that pace `SameHostPeers`.
    """

    def steps(complete: Complete) -> None:
        transport = transport_for(groups.collectives[group], unsharded.nbytes, unsharded.is_cpu, complete)
        transport.all_gather(unsharded, shard, complete)

    groups.order_checkers[group].exchange(entry, group, unsharded.device, steps)


def all_gather_rows(rows: Sequence[Tensor], groups: Groups, group: dist.ProcessGroup, entry: str) -> None:
    """Fill each tensor [W, n] of `rows` with every rank's row. This rank's rows must already be in place.

    Collectives: one all-gather, or the all-reduces that pace `SameHostPeers`.
    """
    nbytes, on_host = sum(row.nbytes for row in rows), rows[0].is_cpu

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


@dataclass(frozen=True)
class PartialSum:
    """Sum [S] of reductions whose all-reduce was put off, and the number of elements of each parameter, in order."""

    values: Tensor
    numels: Mapping[Hashable, int]

    def in_layout(self, numels: Mapping[Hashable, int]) -> Tensor:
        """Return the sum with zeros for parameters that only `numels` has. `numels` has all parameters of this sum."""
        if list(numels) == list(self.numels):
            return self.values
        shards = dict(zip(self.numels, self.values.split([*self.numels.values()]), strict=True))
        zeros = {key: self.values.new_zeros(numel) for key, numel in numels.items() if key not in shards}
        return torch.cat([shards[key] if key in shards else zeros[key] for key in numels])


class Reduction:
    """Average of a group's gradients over its ranks, with the user's settings and hooks.

    Args:
        describe_settings: returns the sharding settings that all ranks must share, without defaults, as text.
    """

    def __init__(self, groups: Groups, describe_settings: Callable[[], str]) -> None:
        self.groups = groups
        self._describe_settings = describe_settings
        # Actions that were not recorded yet. The first entry of each also names the settings.
        self._unrecorded = {GATHERED, REDUCED}
        self.missing_suffix = ""  # names of parameters without gradients here
        self.numels: Mapping[Hashable, int] = {}  # elements of each parameter in the next shard, in order
        self.defers_all_reduce = False  # `partial_sum` accumulates scattered shards instead
        self.partial_sum: PartialSum | None = None
        # FullyShardedDataParallel.register_comm_hook: replaces the reduce-scatter and the all-reduce.
        self.comm_hook: _Hook | None = None
        self.comm_hook_state: Any = None
        # Setters of fully_shard's FSDPModule.
        self.divide_factor: float | None = None  # replaces the number of ranks
        self.scatter_group: dist.ProcessGroup | None = None  # default: the group that gathers
        self.custom_reduce_scatter: Any = None
        self.all_reduce_hook: Callable[[Tensor], None] | None = None  # called with each reduced shard
        self.forces_sums = False  # the user's hook and reduce-scatter see no averages

    @property
    def casts_itself(self) -> bool:
        return self.comm_hook in _LOW_PRECISION

    def entry(self, action: str, name: str) -> str:
        """Return the text that ranks compare.

        The first gather and the first reduction add the settings that are not defaults.
        """
        entry = f"{action} '{name}'"
        if action not in self._unrecorded:
            return entry
        self._unrecorded.remove(action)
        settings = self._describe_settings()
        return f"{entry}{WITH}{settings}" if settings else entry

    def scatter(self, buffer: Tensor, name: str) -> Scattered | None:
        """Start to average a buffer [W * S] of the unit `name` over all ranks.

        Return this rank's shard [S] for `finish`, or None if its all-reduce is put off. The buffer is overwritten. The
        shard is the buffer itself if nothing is sharded.
        Collectives: a reduce-scatter if parameters are sharded (over gloo an all-to-all, or the all-reduces that pace
            `SameHostPeers`).
        """
        factor = self.divide_factor
        divided = "" if factor is None or factor == self.groups.size else f"{DIVIDED}{float(factor)}"
        entry = self.entry(REDUCED, name) + divided + self.missing_suffix
        if self.comm_hook is None:
            return self._start_sum(buffer, entry)
        if self.comm_hook in _LOW_PRECISION:
            return self._start_sum(buffer.to(_LOW_PRECISION[self.comm_hook]), entry)
        self.note(entry, buffer.device)
        if self.groups.shard is None:
            self.comm_hook(self.comm_hook_state, buffer)
            return Scattered(buffer, entry, is_reduced=True)
        output = buffer.new_empty(buffer.numel() // self.groups.shard_size)
        self.comm_hook(self.comm_hook_state, buffer, output)
        return Scattered(output, entry, is_reduced=True)

    def finish(self, scattered: Scattered) -> Tensor:
        """Return the average [S] over all ranks, in the memory that `scatter` returned.

        Collectives: an all-reduce if parameters are replicated.
        """
        output, divisor, replicate = scattered.output, scattered.divisor, self.groups.replicate
        if scattered.is_reduced:
            return output
        if replicate is not None:
            self.groups.order_checkers[replicate].run(scattered.entry, all_reduce, replicate, [output])
        if self.all_reduce_hook is not None:
            early = self._divisor_before_hook(divisor, output.dtype)
            self.all_reduce_hook(output.div_(early))
            divisor /= early
        if divisor != 1:
            output.div_(divisor)
        return output

    def note(self, entry: str, device: torch.device) -> None:
        """Record a collective that a hook issues, so that the ranks compare it."""
        for group, order_checker in self.groups.order_checkers.items():
            order_checker.note(entry, group, device)

    def _start_sum(self, buffer: Tensor, entry: str) -> Scattered | None:
        groups = self.groups
        divisor = float(groups.size) if self.divide_factor is None else self.divide_factor
        # Other dtypes have enough exponent range to divide after the sum.
        if buffer.dtype is torch.float16:
            predivisor = predivide_factor(divisor)
            divisor /= predivisor
            if predivisor > 1:
                buffer.div_(predivisor)
        output = buffer
        if groups.shard is not None:
            group = self.scatter_group or groups.shard
            averages = self.custom_reduce_scatter is not None and self._averages(buffer.dtype, group.size())
            op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
            output = self._reduce_scatter(buffer, group, entry, op)
            divisor /= group.size() if averages else 1
        if groups.replicate is not None:
            earlier, self.partial_sum = self.partial_sum, None
            if earlier is not None:
                # The earlier sum stays unchanged, because it is restored if the backward raises.
                total = earlier.in_layout(self.numels)
                # An earlier backward may have reduced in a narrower dtype.
                output = output.add_(total) if total.dtype is output.dtype else total + output
            if self.defers_all_reduce:
                # The buffer is reused once this reduction has ended (`Memory.keep_until_reduced`).
                self.partial_sum = PartialSum(output.clone() if output is buffer else output, self.numels)
                return None
        return Scattered(output, entry, divisor)

    def _averages(self, dtype: torch.dtype, ranks: int) -> bool:
        """Return whether torch calls a user-defined reduce-scatter with ReduceOp.AVG."""
        return dtype in _AVERAGED_DTYPES and not self.forces_sums and self.divide_factor in (None, ranks)

    def _divisor_before_hook(self, divisor: float, dtype: torch.dtype) -> float:
        """Return the factor to divide by before the hook sees a sum. In some dtypes torch's hooks see the average."""
        if dtype in _AVERAGED_DTYPES:
            return 1.0 if self.forces_sums else divisor
        return 1.0 if dtype is torch.float16 else predivide_factor(divisor)

    def _reduce_scatter(self, buffer: Tensor, group: dist.ProcessGroup, entry: str, op: object) -> Tensor:
        """Return the rank's shard of the sum of all buffers, or of their average if `op` is AVG."""
        numel = buffer.numel() // group.size()
        if self.custom_reduce_scatter is not None:
            shard = self.custom_reduce_scatter.allocate((numel,), dtype=buffer.dtype, device=buffer.device)
            self.custom_reduce_scatter(output_tensor=shard, input_tensor=buffer, group=group, op=op)
            return shard
        shard = buffer.new_empty(numel)

        collectives = self.groups.collectives.get(group) or GroupCollectives(group)

        def steps(complete: Complete) -> None:
            transport = transport_for(collectives, buffer.nbytes, buffer.is_cpu, complete)
            transport.reduce_scatter(shard, buffer, complete)

        order_checker_of(group).exchange(entry, group, buffer.device, steps)
        return shard
