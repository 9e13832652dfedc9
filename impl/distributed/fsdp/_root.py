"""What the units of one module tree share: streams, order, the limit on gathers, and the end of backward.

The root is the outermost unit. Its forward begins an iteration; the end of the backward that passes through any of
its units ends it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from impl.distributed.fsdp._buffers import Buffers
from impl.distributed.fsdp._flat_param import FlatParamHandle
from impl.distributed.fsdp._managed import clean_name
from impl.distributed.fsdp._order import Order
from impl.distributed.fsdp._streams import StreamRole, Streams, streams_for
from impl.distributed.fsdp._unit import Unit

# The unit that computes, and the one that is gathered meanwhile.
_UNSHARDED_AT_ONCE = 2


class _EndOfBackward:
    """What autograd calls at the end of a backward; it keeps it alive for as long as the backward runs."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def __call__(self) -> None:
        self._root.end_backward()


class Root:
    """Made when the first forward, or anything else that needs it, finds out which unit is outermost.

    Args:
        outermost: the root's own unit.
        units: all of them, it included.
        device: where they compute.
        limits_gathers: the host waits before it gathers a third unit.
        buffers: of the whole module.
    """

    def __init__(
        self,
        outermost: Unit,
        units: Sequence[Unit],
        device: torch.device,
        limits_gathers: bool,
        buffers: Buffers,
    ) -> None:
        self.buffers = buffers
        self.streams: Streams = streams_for(device)
        self.syncs = True
        self.units = list(units)
        self.device = device
        self._outermost = outermost
        self._limits_gathers = limits_gathers
        self._order: Order[Unit] = Order()
        self._forwards = 0  # that are under way, one inside the other
        self._resharded: dict[Unit, Any] = {}  # whose memory is still theirs, with the event of its last use
        self._ending: weakref.ref[_EndOfBackward] | None = None  # what autograd holds while a backward runs
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._being_reduced: list[tuple[Tensor, Any]] = []
        self._order_checkers = list(
            {one: None for unit in units for one in unit.groups.order_checkers.values()}
        )
        for unit in units:
            unit.shared = self

    @property
    def is_in_backward(self) -> bool:
        self.handle_failed_backward()
        return self._ending is not None

    def handle_failed_backward(self) -> None:
        """A backward that raised is over without having ended: autograd has let go of what it was to call."""
        if self._ending is not None and self._ending() is None:
            self._ending = None
            for unit in self.units:
                unit.abandon_backward()
            self._free_resharded()
            self._order.next_iteration()

    def is_root(self, unit: Unit) -> bool:
        return unit is self._outermost

    def shards_were_written(self) -> None:
        """Gathers see what COMPUTE has written so far."""
        self.streams.wait(StreamRole.GATHER, self.streams.record(StreamRole.COMPUTE))

    def _begin_iteration(self) -> None:
        for unit in self.units:
            for gradients in unit.gradients:
                gradients.refuse_optimizers()
        self._end_step()
        if not any(unit.awaits_backward for unit in self.units):
            self._order.next_iteration()
        self.shards_were_written()

    def begin_backward(self) -> None:
        """Have autograd call `end_backward` when the backward that is running is done."""
        if not self.is_in_backward:
            self.shards_were_written()
            ending = _EndOfBackward(self)
            self._ending = weakref.ref(ending)
            Variable._execution_engine.queue_callback(ending)

    def end_backward(self) -> None:
        """Close every unit; COMPUTE waits for the gradients."""
        for unit in self.units:
            unit.close_backward()
        self.streams.wait(StreamRole.COMPUTE, self.streams.record(StreamRole.REDUCE))
        if any(handle.offloads for unit in self.units for handle in unit.handles):
            self.streams.block(
                self.streams.record(StreamRole.COMPUTE)
            )  # the host reads what was copied to it
        self._being_reduced.clear()
        for unit in self.units:
            unit.show_gradients()
        self._free_resharded()
        self._order.next_iteration()
        self._ending = None
        self._end_step()

    def _end_step(self) -> None:
        for order_checker in self._order_checkers:
            order_checker.end_step()

    def note_begun(self, unit: Unit) -> None:
        """A forward begins; an iteration too, if it is inside of no other."""
        if self.is_in_backward:
            return
        self._forwards += 1
        if self._forwards == 1:
            self._begin_iteration()
        self._order.begin_forward(unit)

    def note_ended(self, unit: Unit) -> None:
        if self.is_in_backward:
            return
        self._order.end_forward(unit)
        self._leave_forward()
        if self._forwards == 0 and not torch.is_grad_enabled():
            self._end_step()  # no backward will

    def note_abandoned(self) -> None:
        if not self.is_in_backward:
            self._leave_forward()

    def next_in_forward(self, unit: Unit) -> Unit | None:
        return self._order.after_in_forward(unit)

    def next_in_backward(self, unit: Unit) -> Unit | None:
        return self._order.after_in_backward(unit)

    def admit(self, unit: Unit) -> None:
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

    def note_resharded(self, unit: Unit) -> None:
        """Free a unit's memory once GATHER, which fills it again, waits for COMPUTE, which may still read it."""
        if not self.streams.is_async:
            unit.free()
            return
        self._resharded[unit] = self.streams.record(StreamRole.COMPUTE)
        if self._forwards == 0 and not self.is_in_backward:
            self._free_resharded()

    def buffer(
        self, handle: FlatParamHandle, dtype: torch.dtype, is_lent: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Memory for all gradients of a flat parameter, [padded_numel], and views of it in the parameters' shapes.

        On one stream every unit gets the same tensor, until it is reduced; what is not sharded keeps its buffer
        as `.grad`.
        """
        numel = handle.layout.padded_numel
        if self.streams.is_async or not handle.is_sharded or not is_lent:
            made = torch.empty(numel, dtype=dtype, device=self.device)
            return made, handle.views_of(made)
        longest = self._buffers.get(dtype)
        if longest is None or longest.numel() < numel:
            longest = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=self.device)
            self._views.clear()
        longest.untyped_storage().resize_(longest.nbytes)
        buffer = longest[:numel]
        views = self._views.get((id(handle), dtype))
        if views is None:
            views = self._views[id(handle), dtype] = handle.views_of(buffer)
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

    def _leave_forward(self) -> None:
        self._forwards -= 1
        if self._forwards == 0:
            for unit in self.units:
                unit.reshard_unused()
            self._free_resharded()

    def _free_resharded(self) -> None:
        for unit in list(self._resharded):
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        self.streams.wait(StreamRole.GATHER, self._resharded.pop(unit))
        unit.free()


def root_over(wrappers: Sequence[Any], device: torch.device) -> Root:
    """The root of wrappers that lie inside one another, the outermost first; each has to fit its root, and its device.

    Raises:
        ValueError: they differ in what a root can have in one way alone.
        RuntimeError: the parameters of one are not where it computes.
    """
    check_alike(wrappers)
    for one in wrappers:
        _check_device(one._unit, one.compute_device)
    outermost = wrappers[0]
    names = {one: clean_name(f"{name}.").rstrip(".") for name, one in outermost.named_modules()}
    for one in wrappers:
        one._unit.name = names[one] or type(one.module).__name__
    units = [one._unit for one in wrappers]
    return Root(outermost._unit, units, device, outermost.limit_all_gathers, Buffers(wrappers, device))


def _check_device(unit: Unit, compute_device: torch.device) -> None:
    """
    Raises:
        RuntimeError: the parameters were moved to where they cannot be gathered from, or not moved there.
    """
    for handle in unit.handles:
        device = handle.flat_param.device
        if not handle.offloads and device != compute_device:
            raise RuntimeError(
                f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move the module to "
                f"{compute_device} before training."
            )
        if handle.offloads and device.type != "cpu":
            raise RuntimeError(
                "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
                f"{device}. Make sure to not move the module from CPU when offloading parameters."
            )


def check_alike(wrappers: Sequence[Any]) -> None:
    """
    Raises:
        ValueError: something that one root can have in one way alone is different in two of its wrappers.
    """
    for name in ("_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"):
        values = {getattr(one, name) for one in wrappers}
        if len(values) != 1:
            raise ValueError(f"Expects one homogeneous value for {name} but got {values}")
