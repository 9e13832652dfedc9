"""What the units of one module tree share: streams, order, the limit on gathers, and the end of backward.

The root is the outermost unit. Its forward begins an iteration; the end of the backward that passes through any of
its units ends it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable

from impl.distributed.fsdp._engine.memory import Memory
from impl.distributed.fsdp._engine.missed_backwards import check_gradients, note_backward, note_forward
from impl.distributed.fsdp._engine.order import Order
from impl.distributed.fsdp._engine.streams import (
    StreamRole,
    Streams,
    shards_were_read,
    shards_were_written,
    streams_for,
)
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._engine.waiting_gradients import note_waiting
from impl.distributed.fsdp._params.autograd import outside_transforms, runs_backward


class _EndOfBackward:
    """What autograd calls at the end of a backward; it keeps it alive for as long as the backward runs."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def __call__(self) -> None:
        self._root.end_backward()


@dataclass
class StepSettings:
    """User settings for the next steps. They may be set before the root exists."""

    is_last_backward: bool = True  # COMPUTE waits for its gradients
    is_finalized_by_user: bool = False  # the user ends the iteration, instead of its last backward
    post_optim_event: Any = None  # what GATHER waits for in the next forward, instead of COMPUTE


class Root:
    """Made when the first forward, or anything else that needs it, finds out which unit is outermost.

    Args:
        outermost: the root's own unit.
        units: all of them, it included.
        device: where they compute.
        limits_gathers: the host waits before it gathers a third unit.
        settings: that may be changed while units run.
    """

    def __init__(
        self,
        outermost: Unit[Any],
        units: Sequence[Unit[Any]],
        device: torch.device,
        limits_gathers: bool,
        settings: StepSettings | None = None,
    ) -> None:
        self.streams: Streams = streams_for(device)
        self.memory = Memory(self.streams, device, limits_gathers, self.is_idle)
        self.settings = settings if settings is not None else StepSettings()
        self.order: Order[Unit[Any]] = Order()
        self.units = list(units)
        self._outermost = outermost
        self._forwards = 0  # that are under way, one inside the other
        self._thread = 0  # of the last forward, which calls its backward too
        self._ending: weakref.ref[_EndOfBackward] | None = None  # what autograd holds while a backward runs
        # Whether the user finalizes the backwards since the last finalization. None if there was none.
        self.awaits_user: bool | None = None
        groups = [group for unit in units for group in unit.param_groups]
        self._order_checkers = list(
            {one: None for each in groups for one in each.groups.order_checkers.values()}
        )
        self._offloads = any(group.offloads for group in groups)
        self._pins = any(group.pins for group in groups)
        for unit in units:
            unit.root = self

    @property
    def is_in_backward(self) -> bool:
        self.handle_failed_backward()
        return self._ending is not None

    @property
    def adds_up_later(self) -> bool:
        """REDUCE goes on beside what COMPUTE does next, and adds to `.grad` what it has in memory of its own."""
        settings = self.settings
        waits_at_end = settings.is_last_backward and not settings.is_finalized_by_user
        return self.streams.is_async and not (waits_at_end or self._offloads)

    def handle_failed_backward(self) -> None:
        """A backward that raised is over without having ended: autograd has let go of what it was to call.

        On a device its caller goes on before autograd's own thread has let go: where that caller runs no backward, it
        is over.
        """
        if self._ending is None:
            return
        has_gone_on = threading.get_ident() == self._thread and not runs_backward()
        if self._ending() is None or has_gone_on:
            self._ending = None
            for unit in self.units:
                unit.abandon_backward()
            self.memory.free_resharded()
            self.order.next_iteration()

    def use_streams(self, streams: Streams) -> None:
        """Those of another root, before anything has run on its own."""
        self.streams = self.memory.streams = streams

    def gather_behind(self, earlier: Iterable[Streams]) -> None:
        """What units gathered by hand before there was this root was issued to these."""
        for streams in earlier:
            self.streams.wait(StreamRole.GATHER, streams.record(StreamRole.GATHER))

    def reset(self) -> None:
        """Behind an exception: no forward or backward is under way."""
        self._forwards = 0
        self._ending = None
        for unit in self.units:
            unit.awaits_reduction = False
        self.wait_for_gradients()
        self.memory.free_resharded()
        self.order.next_iteration()

    def is_root(self, unit: Unit[Any]) -> bool:
        return unit is self._outermost

    def _begin_iteration(self) -> None:
        check_gradients(self.units)
        note_forward(self)
        for unit in self.units:
            for group in unit.param_groups:
                group.gradients.check_optimizers()
        self._end_step()
        if self.order.is_long or not any(unit.awaits_backward for unit in self.units):
            self.order.next_iteration()
        event, self.settings.post_optim_event = self.settings.post_optim_event, None
        if event is None:
            shards_were_written(self.streams)
        else:
            self.streams.wait(StreamRole.GATHER, event)

    def begin_backward(self) -> None:
        """Have autograd call `end_backward` when the backward that is running is done."""
        if not self.is_in_backward:
            ending = _EndOfBackward(self)
            self._ending = weakref.ref(ending)
            Variable._execution_engine.queue_callback(ending)

    @outside_transforms
    def end_backward(self) -> None:
        """Close every unit; COMPUTE waits for the gradients, or REDUCE goes on with them if others will be added.

        If the user finalizes the backward, gradients that are not reduced yet stay on the unsharded parameters.
        """
        settings = self.settings
        for unit in self.units:
            if settings.is_finalized_by_user:
                unit.leave_backward_open()
            else:
                unit.close_backward()
        self._show_gradients()
        if settings.is_finalized_by_user:
            self.awaits_user = True
        else:
            self.awaits_user = None if settings.is_last_backward else False
        self._end_pass()

    @outside_transforms
    def finalize_backward(self) -> None:
        """Reduce the gradients that backwards left, and reshard. `wait_for_gradients` must follow."""
        for unit in self.units:
            unit.finalize_backward()
        self._show_gradients()
        self._end_pass()

    def wait_for_gradients(self) -> None:
        """Make COMPUTE wait for reductions that are under way, and end the iteration."""
        self.streams.wait(StreamRole.COMPUTE, self.streams.record(StreamRole.REDUCE))
        self.memory.forget_reduced()
        self.awaits_user = None
        for unit in self.units:
            note_waiting(unit.param_groups, unit.name)

    def _show_gradients(self) -> None:
        """Publish the reduced gradients in `.grad`, on COMPUTE or, if more are added later, on REDUCE."""
        if self.memory.is_all_reducing:
            self.streams.wait(StreamRole.REDUCE, self.streams.record(StreamRole.ALL_REDUCE))
            self.memory.forget_all_reduced()
        adds_up_on = StreamRole.REDUCE
        if not self.adds_up_later:
            self.streams.wait(StreamRole.COMPUTE, self.streams.record(StreamRole.REDUCE))
            self.memory.forget_reduced()
            adds_up_on = StreamRole.COMPUTE
        if self._offloads:
            self.streams.block(
                self.streams.record(StreamRole.COMPUTE)
            )  # the host reads what was copied to it
        with self.streams.on(adds_up_on):
            for unit in self.units:
                unit.show_gradients()

    def _end_pass(self) -> None:
        for unit in self.units:
            note_waiting(unit.param_groups, unit.name, is_open=bool(self.awaits_user))
        self.memory.free_resharded()
        self.order.next_iteration()
        self._ending = None
        note_backward(self)
        self._end_step()

    def _end_step(self) -> None:
        for order_checker in self._order_checkers:
            order_checker.end_step()

    def note_begun(self, unit: Unit[Any]) -> None:
        """A forward begins; an iteration too, if it is inside of no other."""
        if self.is_in_backward:
            return
        self._forwards += 1
        self._thread = threading.get_ident()
        if self._forwards == 1:
            self._begin_iteration()
        self.order.begin_forward(unit)

    def note_ended(self, unit: Unit[Any]) -> None:
        if self.is_in_backward:
            return
        self.order.end_forward(unit)
        self._leave_forward()
        if self._forwards == 0 and not torch.is_grad_enabled():
            self._end_step()  # no backward will
            for evaluated in self.units:
                evaluated.gather_again_if_kept()

    def note_abandoned(self) -> None:
        if not self.is_in_backward:
            self._leave_forward()

    def is_in_forward(self) -> bool:
        return self._forwards > 0

    def is_idle(self) -> bool:
        return self._forwards == 0 and not self.is_in_backward

    def _leave_forward(self) -> None:
        self._forwards -= 1
        if self._forwards == 0:
            for unit in self.units:
                unit.reshard_unused()
            self.memory.free_resharded()
            self.let_host_write()

    def let_host_write(self) -> None:
        """Between forwards and backwards, to shards in pinned memory: behind the gathers that copy from them."""
        if self._pins and self.is_idle():
            shards_were_read(self.streams)
