"""Handles of asynchronous finalizations, and the context that roots with the same streams share."""

from __future__ import annotations

from dataclasses import dataclass

from impl.distributed.fsdp._engine.root import Root
from impl.distributed.fsdp._engine.streams import Streams


@dataclass
class CommContext:
    """Streams that roots may share, and the one finalization that they may have to wait for."""

    streams: Streams | None = None
    reduction: PendingReduction | None = None

    def check_waited(self) -> None:
        """Raise RuntimeError in a forward after an asynchronous finalization that was not waited for."""
        if self.reduction is None:
            return
        error = RuntimeError("The previous gradient reduction must be waited on before forward")
        error.add_note(
            "Call wait() of the handle that finalize_backward(async_op=True) has returned, or reset_iter_state() of "
            "the root if the handle was lost."
        )
        raise error


class GradientReductionHandle:
    """Handle that `FSDPModule.finalize_backward(async_op=True)` returns.

    Source: torch.distributed.fsdp.GradientReductionHandle 2.15; differences: none.

    >>> GradientReductionHandle().wait()
    """

    def wait(self) -> None:
        """Make the current stream wait for the gradients, and allow the next forward.

        Raises:
            RuntimeError: `reset_iter_state` was called since.
        Sync: none. Collectives: none.
        """


class PendingReduction(GradientReductionHandle):
    """Finalization of `root` that all roots with the same `comm` have to wait for."""

    def __init__(self, root: Root, comm: CommContext) -> None:
        self.root = root
        self._comm = comm
        self._is_done = False

    def wait(self) -> None:
        if self._is_done:
            return
        if self._comm.reduction is not self:
            raise RuntimeError("This gradient reduction handle was invalidated")
        self._comm.reduction = None
        self._is_done = True
        self.root.wait_for_gradients()
