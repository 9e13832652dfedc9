"""Offloaded shards on the host in the dtype that their group is gathered in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ShardVersions(NamedTuple):
    """Shards, with numbers that change whenever a shard may have been written to."""

    shards: Sequence[Tensor]
    numbers: Sequence[Hashable]

    def changed_since(self, before: ShardVersions) -> list[int]:
        """Return the indices of shards that were written to or replaced. Without shards before, there are none."""
        pairs = zip(self.shards, self.numbers, *before, strict=False)
        return [
            i
            for i, (shard, number, old_shard, old_number) in enumerate(pairs)
            if shard is not old_shard or number != old_number
        ]

    def updated(self, later: ShardVersions, changed: Collection[int]) -> ShardVersions:
        """Return these versions with those of `later` instead, except for the `changed` shards."""
        pairs = enumerate(zip(zip(*self, strict=True), zip(*later, strict=True), strict=False))
        entries = [before if index in changed else after for index, (before, after) in pairs]
        return ShardVersions([shard for shard, _ in entries], [number for _, number in entries])

    def are_those(self, before: ShardVersions) -> bool:
        """Return whether no shard was written to or replaced."""
        return self.numbers == before.numbers and all(map(operator.is_, self.shards, before.shards))


class CastShards:
    """Memory for casts of shards, which an optimizer step fills in the pass that updates the shards.

    While a cast is current, gathers read it instead of the shard: fewer bytes go to the device, which casts nothing.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        # Shards with current casts, with their numbers in `ShardVersions` at that time.
        self._cast_from: dict[int, tuple[Tensor, Hashable]] = {}

    def memory(self, index: int, shard: Tensor, dtype: torch.dtype, *, pins: bool) -> Tensor:
        """Return the memory with this index, for a shard in this dtype. It is kept while shape and dtype are the same.

        Args:
            pins: pin it, so that it is copied to the device without blocking the host.
        """
        tensor = self.tensors.get(index)
        if tensor is None or tensor.shape != shard.shape or tensor.dtype is not dtype:
            self.forget()
            tensor = torch.empty_like(shard, dtype=dtype, device="cpu", pin_memory=pins)
            self.tensors[index] = tensor
        return tensor

    def record(self, written: Iterable[int], versions: ShardVersions) -> None:
        """Record that the casts of the `written` shards have the values of these versions."""
        for index in written:
            self._cast_from[index] = versions.shards[index], versions.numbers[index]

    def current(self, versions: Callable[[], ShardVersions]) -> Collection[int]:
        """Return the indices of shards whose casts have the values of these versions. Forget all other casts."""
        if self._cast_from:
            shards, numbers = versions()
            self._cast_from = {
                index: (shard, number)
                for index, (shard, number) in self._cast_from.items()
                if shards[index] is shard and numbers[index] == number
            }
        return self._cast_from.keys()

    def forget(self) -> None:
        """Make the next gathers read the shards, which may be written to without a new version, or have new memory."""
        self._cast_from.clear()
