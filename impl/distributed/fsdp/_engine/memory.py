"""Memory that the units of one root share: unsharded parameters, and buffers of reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from impl.distributed.fsdp._engine.streams import StreamRole, Streams
from impl.distributed.fsdp._params.param_group import ViewsOf

# The unit that computes, and the one that is gathered in the meantime. The same of buffers: reduced, and filled.
_UNSHARDED_AT_ONCE = _REDUCED_AT_ONCE = 2


class Unshardable(Protocol):
    """Unit whose parameters can be unsharded."""

    def free(self) -> None: ...


class Memory:
    """Memory of the units of one root.

    Args:
        device: compute device.
        limits_gathers: the host waits before it gathers a third unit.
        is_idle: returns whether no unit is in a forward or backward.
    """

    def __init__(
        self, streams: Streams, device: torch.device, limits_gathers: bool, is_idle: Callable[[], bool]
    ) -> None:
        self.streams = streams
        self._device = device
        self._limits_gathers = limits_gathers
        self._is_idle = is_idle
        # Resharded units whose memory is not freed yet, with the events of their last uses.
        self._resharded: dict[Unshardable, list[torch.Event | None]] = {}
        # On the CPU, the buffer of each dtype that all groups share, and each group's views of it.
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._scratch_views: dict[tuple[ViewsOf, torch.dtype], list[Tensor]] = {}
        # Buffers with the ends of their reductions, and the streams that allocated them.
        self._being_reduced: list[tuple[Tensor, torch.Event | None, torch.Stream | None]] = []
        self._being_all_reduced: list[Tensor] = []

    def admit(self, unit: Unshardable) -> None:
        """Wait until a unit may be unsharded.

        It does not get the memory of the unit that was resharded last, so it can be gathered while that unit computes.
        """
        if unit in self._resharded:
            self._free(unit)
        while len(self._resharded) >= _UNSHARDED_AT_ONCE:
            oldest = next(iter(self._resharded))
            if self._limits_gathers:
                for event in self._resharded[oldest]:
                    self.streams.block(event)
            self._free(oldest)

    def note_resharded(self, unit: Unshardable, readers: Sequence[torch.Stream] = ()) -> None:
        """Free a unit's memory once GATHER, which fills it again, waits for COMPUTE and other streams that read it.

        Args:
            readers: streams that were COMPUTE when they used the unit.
        """
        if not self.streams.is_async:
            unit.free()
            return
        current = self.streams.current()
        others = [self.streams.record_in(stream) for stream in readers if stream != current]
        self._resharded[unit] = [self.streams.record(StreamRole.COMPUTE), *others]
        if self._is_idle():
            self.free_resharded()

    def free_resharded(self) -> None:
        for unit in list(self._resharded):
            self._free(unit)

    def buffer(
        self, numel: int, dtype: torch.dtype, views_of: ViewsOf, *, is_scratch: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return memory [numel] for the gradients of a group, and `views_of` it.

        Scratch memory is shared: on one stream every group gets the same tensor, until it is reduced.
        """
        if self.streams.is_async or not is_scratch:
            buffer = torch.empty(numel, dtype=dtype, device=self._device)
            return buffer, views_of(buffer)
        longest = self._scratch.get(dtype)
        if longest is None or longest.numel() < numel:
            longest = self._scratch[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
            self._scratch_views.clear()
        longest.untyped_storage().resize_(longest.nbytes)
        buffer = longest[:numel]
        views = self._scratch_views.get((views_of, dtype))
        if views is None:
            views = self._scratch_views[views_of, dtype] = views_of(buffer)
        return buffer, views

    def keep_until_reduced(self, buffer: Tensor) -> None:
        """Keep a buffer that REDUCE reads until the current stream, which allocated it, has waited for REDUCE.

        torch's allocator lets that stream reuse freed memory at once. The stream is remembered, because the user may
        make another one current meanwhile. On the CPU the buffer has been read, and the shared memory is freed.
        """
        if not self.streams.is_async:
            for shared in self._scratch.values():
                shared.untyped_storage().resize_(0)
            return
        while len(self._being_reduced) >= _REDUCED_AT_ONCE:
            _, event, stream = self._being_reduced.pop(0)
            self.streams.wait_in(stream, event)
        event = self.streams.record(StreamRole.REDUCE)
        self._being_reduced.append((buffer, event, self.streams.current()))

    @property
    def is_all_reducing(self) -> bool:
        """Whether ALL_REDUCE may still use shards that REDUCE scattered."""
        return bool(self._being_all_reduced)

    def keep_until_all_reduced(self, shard: Tensor) -> None:
        """Keep a shard of REDUCE's memory until REDUCE, which will reuse it, has waited for ALL_REDUCE."""
        if self.streams.is_async:
            self._being_all_reduced.append(shard)

    def forget_all_reduced(self) -> None:
        """Release all shards, because REDUCE has waited for ALL_REDUCE."""
        self._being_all_reduced.clear()

    def forget_reduced(self) -> None:
        """Release all buffers, because COMPUTE has waited for them. Other streams wait for their own buffers here."""
        current = self.streams.current()
        for _, event, stream in self._being_reduced:
            if stream != current:
                self.streams.wait_in(stream, event)
        self._being_reduced.clear()

    def _free(self, unit: Unshardable) -> None:
        for event in self._resharded.pop(unit):
            self.streams.wait(StreamRole.GATHER, event)
        unit.free()
