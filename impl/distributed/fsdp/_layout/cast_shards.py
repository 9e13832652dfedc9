"""Offloaded shards on the host in the dtype that their group is gathered in."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
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

    def are_those(self, before: ShardVersions) -> bool:
        """Return whether no shard was written to or replaced."""
        return self.numbers == before.numbers and all(map(operator.is_, self.shards, before.shards))


class CastShards:
    """Memory for casts of shards, which an optimizer step fills in the pass that updates the shards.

    While a cast is current, gathers read it instead of the shard: fewer bytes go to the device, which casts nothing.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._current: set[int] = set()  # shards whose casts were current at `_versions`
        self._versions = ShardVersions([], [])

    def allocate(self, shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], *, pins: bool) -> None:
        """Use memory for these shards and dtypes. It is kept while they stay the same.

        Args:
            pins: pin it, so that it is copied to the device without blocking the host.
        """
        pairs = list(zip(shards, dtypes, strict=True))
        if [(tensor.shape, tensor.dtype) for tensor in self.tensors] == [
            (shard.shape, dtype) for shard, dtype in pairs
        ]:
            return
        self.tensors = [
            torch.empty_like(shard, dtype=dtype, device="cpu", pin_memory=pins) for shard, dtype in pairs
        ]
        self._current.clear()

    def record(self, written: Iterable[int], versions: ShardVersions) -> None:
        """Record that the casts of the `written` shards have the values of these versions."""
        self._current.difference_update(versions.changed_since(self._versions))
        self._current.update(written)
        self._versions = versions

    def current(self, versions: ShardVersions) -> set[int]:
        """Return the indices of shards whose casts have their values."""
        return self._current.difference(versions.changed_since(self._versions)) if self._current else set()
