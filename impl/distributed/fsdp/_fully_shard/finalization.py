"""Backwards whose end the user decides: what may be called when, and handles of asynchronous finalizations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from impl.distributed.fsdp._engine.root import Root, StepSettings
from impl.distributed.fsdp._params.autograd import runs_backward

if TYPE_CHECKING:
    from impl.distributed.fsdp._fully_shard.module_state import CommContext, ModuleState

_ROOT_ALONE = "set_manual_backward_finalization must be called on the root FSDP module"


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
    """A finalization of `root` that roots with the same `comm` have to wait for."""

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


def set_manual_finalization(state: ModuleState, enabled: bool) -> None:
    if state.is_root is False:
        raise RuntimeError(_ROOT_ALONE)
    if enabled != state.settings.is_finalized_by_user and runs_backward():
        raise RuntimeError("set_manual_backward_finalization cannot change mode during backward")
    root = state.own_root
    if root is not None and root.awaits_user not in (None, enabled):
        raise RuntimeError("set_manual_backward_finalization cannot change mode after backward starts")
    state.settings.is_finalized_by_user = enabled


def finalize(state: ModuleState) -> GradientReductionHandle:
    """Reduce what backwards of the root `state` left. Before its first forward there is nothing to reduce.

    Raises:
        RuntimeError: it is no root, its backward does not end by hand or is running, the handle of the last
            finalization was not waited for, or replicas put off their all-reduce.
    """
    if state.is_root is None:
        return GradientReductionHandle()
    if (pending := state.comm.reduction) is not None:
        raise RuntimeError(
            "The previous gradient reduction must be waited on before finalizing backward again"
            if pending.root is state.unit.root
            else "Another gradient reduction sharing this communication context must be waited on before finalizing "
            "backward"
        )
    root = state.own_root
    if root is None:
        raise RuntimeError("finalize_backward must be called on the root FSDP module")
    _check_mode(root)
    _check_replicas(root)
    root.finalize_backward()
    state.comm.reduction = handle = PendingReduction(root, state.comm)
    return handle


def _check_mode(root: Root) -> None:
    if not root.settings.is_finalized_by_user:
        raise RuntimeError(
            "FSDP finalize_backward requires manual backward finalization. Call "
            "set_manual_backward_finalization(True) before forward"
        )
    if root.is_in_backward:
        raise RuntimeError("FSDP finalize_backward must be called after backward completes")


def _check_replicas(root: Root) -> None:
    pairs = [
        ("<root>" if root.is_root(unit) else unit.name, unit, group)
        for unit in root.units
        for group in unit.param_groups
        if group.groups.replicate is not None
    ]
    for name, _, group in pairs:
        if group.reduction.partial is not None:
            raise RuntimeError(
                "FSDP manual backward finalization does not support partial gradient reductions for parameter group "
                f"{name!r}. Use automatic backward finalization for this configuration"
            )
    for name, unit, group in pairs:
        if unit.awaits_reduction and group.syncs and group.reduction.defers_all_reduce:
            raise RuntimeError(
                f"FSDP manual backward finalization requires all-reduce for parameter group {name!r}. Call "
                "set_requires_all_reduce(True) before finalization"
            )


def check_settings(inner: Iterable[StepSettings]) -> None:
    """Raise RuntimeError if a module inside a root is to finalize backwards."""
    if any(settings.is_finalized_by_user for settings in inner):
        raise RuntimeError(_ROOT_ALONE)


def check_waited(comm: CommContext) -> None:
    """Raise RuntimeError in a forward after an asynchronous finalization that was not waited for."""
    if comm.reduction is None:
        return
    error = RuntimeError("The previous gradient reduction must be waited on before forward")
    error.add_note(
        "Call wait() of the handle that finalize_backward(async_op=True) has returned, or reset_iter_state() of the "
        "root if the handle was lost."
    )
    raise error
