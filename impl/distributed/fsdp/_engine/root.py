"""State that the units of one module tree share: streams, order, the limit on gathers, and the end of backward.

The root is the outermost unit. Its forward begins an iteration. The end of a backward through any of its units ends
the iteration.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.autograd import Variable

from impl.distributed.fsdp._engine.interfaces import IterationEnd, StepSettings
from impl.distributed.fsdp._engine.memory import Memory
from impl.distributed.fsdp._engine.missed_backwards import check_gradients, note_backward, note_forward
from impl.distributed.fsdp._engine.order import Order
from impl.distributed.fsdp._engine.phase import FORWARDS
from impl.distributed.fsdp._engine.streams import StreamRole, Streams, streams_for
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._engine.unsynchronized_steps import record_unsynchronized
from impl.distributed.fsdp._params.autograd import outside_transforms, runs_backward
from impl.distributed.fsdp._params.param_group import ParamGroup


class _EndOfBackward:
    """Callback of autograd at the end of a backward. autograd keeps it alive as long as the backward runs."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def __call__(self) -> None:
        self._root.end_backward()


class Root:
    """Root of a module tree, created when a forward or another call finds out which unit is outermost.

    Args:
        outermost: the root's own unit.
        units: all units, including the outermost one.
        device: compute device.
        limits_gathers: the host waits before it gathers a third unit.
        settings: settings that may be changed while units run.
    """

    def __init__(
        self,
        outermost: Unit[ParamGroup],
        units: Sequence[Unit[ParamGroup]],
        device: torch.device,
        limits_gathers: bool,
        settings: StepSettings | None = None,
    ) -> None:
        self.streams: Streams = streams_for(device)
        self.memory = Memory(self.streams, device, limits_gathers, self.is_idle)
        self.settings = settings if settings is not None else StepSettings()
        self.order: Order[Unit[ParamGroup]] = Order()
        self.units = list(units)
        self._outermost = outermost
        self._forwards: list[Unit[ParamGroup]] = []  # units in a forward, the outermost one first
        self._thread = 0  # thread of the last forward
        self._ending: weakref.ref[_EndOfBackward] | None = None  # alive while a backward runs
        # No backward is left open if this is None.
        self.awaited_end: IterationEnd | None = None
        groups = [group for unit in units for group in unit.param_groups]
        order_checkers = (group.process_groups.order_checkers.values() for group in groups)
        self._order_checkers = [*dict.fromkeys(chain.from_iterable(order_checkers))]
        self._offloads = any(group.offloads for group in groups)
        self._pins = any(group.pins for group in groups)
        for unit in units:
            if unit.root_or_none is not None:
                unit.root_or_none.handle_failed_backward()
            unit.root_or_none = self

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward runs. First end one that has failed, which autograd does not report."""
        self.handle_failed_backward()
        return self._ending is not None

    @property
    def accumulates_on_reduce_stream(self) -> bool:
        """Whether REDUCE adds to `.grad`, in its own memory, while COMPUTE continues."""
        settings = self.settings
        waits_at_end = settings.is_last_backward and not settings.is_finalized_by_user
        if not self.streams.is_async or waits_at_end or self._offloads:
            return False
        # Hooks run on REDUCE, and may have stepped the parameters.
        stepped = (param for unit in self.units for group in unit.param_groups for param in group.stepped)
        return not any(param._post_accumulate_grad_hooks or param._backward_hooks for param in stepped)

    def handle_failed_backward(self) -> None:
        """End a backward that raised. autograd has released its callback without calling it.

        On a device the caller continues before autograd's thread has released the callback. If the caller runs no
        backward, the backward is over. So the thread of the last forward must call backward too. On the CPU the
        callback is released first, and any thread may call backward.
        """
        if self._ending is None:
            return
        is_by_caller = self.streams.is_async and threading.get_ident() == self._thread
        if self._ending() is None or (is_by_caller and not runs_backward()):
            self._ending = None
            for unit in self.units:
                unit.abandon_backward()
            # Hooks run on REDUCE, and may have stepped the parameters.
            self.streams.wait_stream(StreamRole.REDUCE, StreamRole.ALL_REDUCE)
            self.streams.wait_stream(StreamRole.COMPUTE, StreamRole.REDUCE)
            self.memory.free_resharded()
            self.order.next_iteration()

    def use_streams(self, streams: Streams) -> None:
        """Share another root's streams. Call before the first forward."""
        self.streams = self.memory.streams = streams

    def wait_for_earlier_gathers(self, earlier: Iterable[Streams]) -> None:
        """Make GATHER wait for all-gathers that units issued on `earlier` streams, before this root existed."""
        for streams in earlier:
            self.streams.wait(StreamRole.GATHER, streams.record(StreamRole.GATHER))

    def reset(self) -> None:
        """End any forward or backward after an exception."""
        self._forwards = []
        self._ending = None
        for unit in self.units:
            unit.awaits_reduction = False
        self.wait_for_gradients()
        self.memory.free_resharded()
        self.order.next_iteration()

    @property
    def awaits_backward(self) -> bool:
        return self._outermost.awaits_backward

    def is_root(self, unit: Unit[ParamGroup]) -> bool:
        return unit is self._outermost

    def _begin_iteration(self) -> None:
        check_gradients(self.units)
        note_forward(self)
        for unit in self.units:
            for group in unit.param_groups:
                group.gradients.check_optimizers()
            if not torch.is_grad_enabled():
                unit.gather_again_if_used()
        self._end_step()
        if self.order.is_long or not any(unit.awaits_backward for unit in self.units):
            self.order.next_iteration()
        event, self.settings.post_optim_event = self.settings.post_optim_event, None
        if event is None:
            self.streams.wait_stream(StreamRole.GATHER, StreamRole.COMPUTE)
        else:
            self.streams.wait(StreamRole.GATHER, event)

    def begin_backward(self) -> None:
        """Register `end_backward` with autograd for the end of the running backward."""
        if not self.is_in_backward:
            _check_engine()
            ending = _EndOfBackward(self)
            self._ending = weakref.ref(ending)
            Variable._execution_engine.queue_callback(ending)

    @outside_transforms
    def end_backward(self) -> None:
        """Finish every unit.

        COMPUTE waits for the gradients, or REDUCE continues with them if others will be added. If the user finalizes
        the backward, gradients that are not reduced yet stay on the unsharded parameters.
        """
        settings = self.settings
        for unit in self.units:
            # If the backward runs inside the unit's forward, the forward still reads the parameters.
            if unit.phase in FORWARDS:
                continue
            if settings.is_finalized_by_user:
                unit.leave_backward_open()
            else:
                unit.complete_backward()
        self._publish_gradients()
        if settings.is_finalized_by_user:
            self.awaited_end = IterationEnd.USER
        else:
            self.awaited_end = None if settings.is_last_backward else IterationEnd.LAST_BACKWARD
        self._close_backward()

    @outside_transforms
    def finalize_backward(self) -> None:
        """Reduce the gradients that backwards left, and reshard. `wait_for_gradients` must follow."""
        for unit in self.units:
            unit.finalize_backward()
        self._publish_gradients()
        self._close_backward()

    def wait_for_gradients(self) -> None:
        """Make COMPUTE wait for reductions that are under way, and end the iteration."""
        self.streams.wait_stream(StreamRole.COMPUTE, StreamRole.REDUCE)
        self.memory.forget_reduced()
        self.awaited_end = None
        for unit in self.units:
            record_unsynchronized(unit.param_groups, unit.name)

    def _publish_gradients(self) -> None:
        """Publish the reduced gradients in `.grad`, on COMPUTE or, if more are added later, on REDUCE."""
        if self.memory.is_all_reducing:
            self.streams.wait_stream(StreamRole.REDUCE, StreamRole.ALL_REDUCE)
            self.memory.forget_all_reduced()
        accumulates_on = StreamRole.REDUCE
        if self.accumulates_on_reduce_stream:
            # A loss that reads the sharded parameters has added to `.grad` on COMPUTE.
            self.streams.wait_stream(StreamRole.REDUCE, StreamRole.COMPUTE)
        else:
            self.streams.wait_stream(StreamRole.COMPUTE, StreamRole.REDUCE)
            self.memory.forget_reduced()
            accumulates_on = StreamRole.COMPUTE
        if self._offloads:
            # The host reads what was copied to it.
            self.streams.block(self.streams.record(StreamRole.COMPUTE))
        with self.streams.on(accumulates_on):
            for unit in self.units:
                unit.publish_gradients()

    def has_gradients(self) -> bool:
        """Return whether any parameter has gradients to step with, or gradients that are not reduced yet."""
        return any(
            unit.awaits_reduction or any(group.gradients.exist_on_any_rank() for group in unit.param_groups)
            for unit in self.units
        )

    def _close_backward(self) -> None:
        is_open = self.awaited_end is IterationEnd.USER
        for unit in self.units:
            record_unsynchronized(unit.param_groups, unit.name, is_open=is_open)
        self.memory.free_resharded()
        self._ending = None
        if self.is_in_forward():
            return  # the iteration goes on
        self.order.next_iteration()
        note_backward(self)
        self._end_step()

    def _end_step(self) -> None:
        for order_checker in self._order_checkers:
            order_checker.end_step()

    def enter_forward(self, unit: Unit[ParamGroup]) -> None:
        """Enter a forward. The outermost forward also starts an iteration."""
        if self.is_in_backward:
            return
        self._forwards.append(unit)
        self._thread = threading.get_ident()
        if self.is_outermost_forward(unit):
            self._begin_iteration()
        self.order.begin_forward(unit)

    def exit_forward(self, unit: Unit[ParamGroup]) -> None:
        if unit not in self._forwards:  # recomputed for backward
            return
        self.order.end_forward(unit)
        self._leave_forward(unit)
        if not self._forwards and not torch.is_grad_enabled():
            self._end_step()  # no backward will end it

    def reshard_after_evaluation(self) -> None:
        """Reshard the units after an outermost forward that was called without gradients, or that left no backward.

        A method of the model may disable gradients itself.
        """
        if not self.is_idle():
            return
        if not (torch.is_grad_enabled() and any(unit.awaits_backward for unit in self.units)):
            for unit in self.units:
                unit.reshard_after_evaluation()

    def abandon_forward(self, unit: Unit[ParamGroup]) -> None:
        """Leave a forward that raised.

        The outermost forward abandons those inside it. A unit of several modules may still wait for its last module.
        """
        if unit not in self._forwards:  # recomputed for backward
            return
        if self.is_outermost_forward(unit):
            for inner in reversed(self._forwards[1:]):
                inner.abandon_forward()
        self._leave_forward(unit)

    def is_in_forward(self) -> bool:
        return bool(self._forwards)

    def is_outermost_forward(self, unit: Unit[ParamGroup]) -> bool:
        return self._forwards[:1] == [unit]

    def is_idle(self) -> bool:
        return not self._forwards and not self.is_in_backward

    def _leave_forward(self, unit: Unit[ParamGroup]) -> None:
        self._forwards.remove(unit)
        if not self._forwards:
            for model_unit in self.units:
                model_unit.reshard_unused()
            self.memory.free_resharded()
            self.wait_for_pinned_reads()
            if self.awaited_end is not None:
                # A loss that reads the sharded parameters adds to `.grad` on COMPUTE.
                self.streams.wait_stream(StreamRole.COMPUTE, StreamRole.REDUCE)

    def wait_for_pinned_reads(self) -> None:
        """Wait until pending all-gathers have read the pinned shards, so that the host may write to them.

        Do nothing during a forward or backward.
        """
        if self._pins and self.is_idle():
            self.streams.block_until_shards_read()


def _check_engine() -> None:
    """Check that autograd's own engine runs the backward. Compiled autograd drops callbacks at its end.

    Raises:
        RuntimeError: compiled autograd runs it.
    """
    # An import of the module would take a second.
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and module.in_compiled_autograd_region:
        raise RuntimeError(
            "compiled autograd does not run the callback that ends the backward of a sharded model, so the model would "
            "not be trained. Turn compiled autograd off. torch.compile of the modules also compiles their backwards"
        )
