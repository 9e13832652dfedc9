"""Finalization of backwards by the user, and checks of its calls."""

from __future__ import annotations

from impl.distributed.fsdp._engine.interfaces import IterationEnd
from impl.distributed.fsdp._engine.root import Root
from impl.distributed.fsdp._fully_shard.module_state import ONLY_ROOT_FINALIZES, ModuleState
from impl.distributed.fsdp._fully_shard.reduction_handle import GradientReductionHandle, PendingReduction
from impl.distributed.fsdp._params.autograd import runs_backward


def set_manual_finalization(state: ModuleState, enabled: bool) -> None:
    if state.is_root is False:
        raise RuntimeError(ONLY_ROOT_FINALIZES)
    if enabled != state.settings.is_finalized_by_user and runs_backward():
        raise RuntimeError("set_manual_backward_finalization cannot change mode during backward")
    root = state.own_root
    end = IterationEnd.USER if enabled else IterationEnd.LAST_BACKWARD
    if root is not None and root.awaited_end not in (None, end):
        raise RuntimeError("set_manual_backward_finalization cannot change mode after backward starts")
    state.settings.is_finalized_by_user = enabled


def finalize(state: ModuleState) -> GradientReductionHandle:
    """Reduce the gradients that backwards of the root `state` left. Do nothing before its first forward.

    Raises:
        RuntimeError: the state is not a root's, its backwards are finalized automatically, a backward is running, the
            handle of the last finalization was not waited for, or replicas defer their all-reduce.
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
        if group.process_groups.replicate is not None
    ]
    for name, _, group in pairs:
        if group.reduction.partial_sum is not None:
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
