"""Memory that the units of one root take turns with: what is unsharded, and what gradients are reduced in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from impl.distributed.fsdp._engine.streams import StreamRole, Streams
from impl.distributed.fsdp._params.param_group import ViewsOf

# The unit that computes, and the one that is gathered meanwhile.
_UNSHARDED_AT_ONCE = 2


class Unshardable(Protocol):
    """A unit."""

    def free(self) -> None: ...


class Memory:
    """
    Args:
        device: where the units compute.
        limits_gathers: the host waits before it gathers a third unit.
        is_idle: whether no unit is in a forward or backward.
    """

    def __init__(
        self, streams: Streams, device: torch.device, limits_gathers: bool, is_idle: Callable[[], bool]
    ) -> None:
        self.streams = streams
        self._device = device
        self._limits_gathers = limits_gathers
        self._is_idle = is_idle
        self._resharded: dict[
            Unshardable, Any
        ] = {}  # whose memory is theirs yet, with the event of its last use
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[ViewsOf, torch.dtype], list[Tensor]] = {}
        self._being_reduced: list[tuple[Tensor, Any]] = []
        self._being_all_reduced: list[Tensor] = []

    def admit(self, unit: Unshardable) -> None:
        """Wait until a unit may be unsharded.

        The memory of the unit that was resharded last is not what it gets: so it is gathered while that one computes.
        """
        if unit in self._resharded:
            self._free(unit)
        while len(self._resharded) >= _UNSHARDED_AT_ONCE:
            oldest = next(iter(self._resharded))
            if self._limits_gathers:
                self.streams.block(self._resharded[oldest])
            self._free(oldest)

    def note_resharded(self, unit: Unshardable) -> None:
        """Free a unit's memory once GATHER, which fills it again, waits for COMPUTE, which may still read it."""
        if not self.streams.is_async:
            unit.free()
            return
        self._resharded[unit] = self.streams.record(StreamRole.COMPUTE)
        if self._is_idle():
            self.free_resharded()

    def free_resharded(self) -> None:
        for unit in list(self._resharded):
            self._free(unit)

    def buffer(
        self, numel: int, dtype: torch.dtype, views_of: ViewsOf, *, is_lent: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Memory for gradients of a group of parameters, [numel], and `views_of` it.

        What is lent is everybody's: on one stream every group gets the same tensor, until it is reduced.
        """
        if self.streams.is_async or not is_lent:
            made = torch.empty(numel, dtype=dtype, device=self._device)
            return made, views_of(made)
        longest = self._buffers.get(dtype)
        if longest is None or longest.numel() < numel:
            longest = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
            self._views.clear()
        longest.untyped_storage().resize_(longest.nbytes)
        buffer = longest[:numel]
        views = self._views.get((views_of, dtype))
        if views is None:
            views = self._views[views_of, dtype] = views_of(buffer)
        return buffer, views

    def keep_until_reduced(self, buffer: Tensor) -> None:
        """Hold a buffer that REDUCE reads until COMPUTE, which will reuse its memory, has waited for that.

        On one stream it has been read, and the memory that units share is freed.
        """
        if not self.streams.is_async:
            for shared in self._buffers.values():
                shared.untyped_storage().resize_(0)
            return
        while len(self._being_reduced) >= _UNSHARDED_AT_ONCE:
            self.streams.wait(StreamRole.COMPUTE, self._being_reduced.pop(0)[1])
        self._being_reduced.append((buffer, self.streams.record(StreamRole.REDUCE)))

    @property
    def is_all_reducing(self) -> bool:
        """Whether ALL_REDUCE may still use shards that REDUCE scattered."""
        return bool(self._being_all_reduced)

    def keep_until_all_reduced(self, shard: Tensor) -> None:
        """Hold a shard of REDUCE's memory until REDUCE, which will reuse it, has waited for ALL_REDUCE."""
        if self.streams.is_async:
            self._being_all_reduced.append(shard)

    def forget_all_reduced(self) -> None:
        """Let go of all shards, because REDUCE has waited for ALL_REDUCE."""
        self._being_all_reduced.clear()

    def forget_reduced(self) -> None:
        """COMPUTE has waited for all of them."""
        self._being_reduced.clear()

    def _free(self, unit: Unshardable) -> None:
        self.streams.wait(StreamRole.GATHER, self._resharded.pop(unit))
        unit.free()
