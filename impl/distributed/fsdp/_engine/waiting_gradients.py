"""Steps of optimizers over gradients that wait to be synchronised: they would take none, or this rank's own."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from impl.distributed.fsdp._params.param_group import ParamGroup, describe_names
from impl.kernels import dynamo_disable


class _Detection:
    """Looks at the steps of all optimizers, but only while something waits."""

    def __init__(self) -> None:
        self.is_on = True
        # By the group of parameters, its unit's name.
        self._waiting: weakref.WeakKeyDictionary[ParamGroup, str] = weakref.WeakKeyDictionary()
        # The same, of iterations that the user has not finalized.
        self._open: weakref.WeakKeyDictionary[ParamGroup, str] = weakref.WeakKeyDictionary()
        self._hook: RemovableHandle | None = None

    def note(self, groups: Iterable[ParamGroup], unit: str, is_open: bool) -> None:
        for group in groups:
            if is_open:
                self._open[group] = unit
            else:
                self._open.pop(group, None)
            may_wait = not group.syncs or group.reduction.defers_all_reduce
            if may_wait and group.gradients.unsynchronized():
                self._waiting[group] = unit
            else:
                self._waiting.pop(group, None)
        has_any = bool(self._waiting or self._open)
        if has_any and self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
        elif not has_any and self._hook is not None:
            self._hook.remove()
            self._hook = None

    @dynamo_disable
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A closure may run the last backward, so there it is looked at behind it."""
        optimizer_itself, *others = args
        closure = others[0] if others else kwargs.get("closure")
        if not callable(closure):  # a step of somebody's may take something else
            self._refuse_if_waiting(optimizer)
            return None

        def checked() -> Any:
            loss = closure()
            self._refuse_if_waiting(optimizer)
            return loss

        if others:
            return (optimizer_itself, checked, *others[1:]), kwargs
        return args, kwargs | {"closure": checked}

    @dynamo_disable
    def _refuse_if_waiting(self, optimizer: Optimizer) -> None:
        if not self.is_on:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._refuse_if_open(stepped)
        names = sorted(
            f"{name} of '{unit}'"
            for group, unit in list(self._waiting.items())
            for name, parameter in group.gradients.unsynchronized()
            if id(parameter) in stepped
        )
        if not names:
            return
        raise RuntimeError(
            f"the gradients of {describe_names(names)} wait to be synchronised, since backwards inside "
            "no_sync() or behind set_requires_gradient_sync(False) or set_requires_all_reduce(False) left them; run "
            "the last backward before a step with synchronisation, clear them (fully_shard's by reset_iter_state()) or "
            "call set_detect_unsynchronized_step(False) to step all the same"
        )

    def _refuse_if_open(self, stepped: Collection[int]) -> None:
        names = sorted(
            f"{name} of '{unit}'"
            for group, unit in list(self._open.items())
            for name, parameter in zip(group.names, group.stepped, strict=True)
            if parameter.requires_grad and id(parameter) in stepped
        )
        if names:
            raise RuntimeError(
                f"the gradients of {describe_names(names)} are not finalized, since "
                "set_manual_backward_finalization(True) leaves that to the caller; before the step, call "
                "finalize_backward() of the root and wait() of the handle that it returns with async_op=True, or call "
                "set_detect_unsynchronized_step(False) to step all the same"
            )


_detection = _Detection()


def note_waiting(groups: Iterable[ParamGroup], unit: str, *, is_open: bool = False) -> None:
    """Note which groups of a unit have gradients that wait. Call at the end of a backward.

    Args:
        is_open: the user has to finalize the backward.
    """
    _detection.note(groups, unit, is_open)


def set_detect_unsynchronized_step(mode: bool) -> None:
    """Set whether an optimizer step is an error if gradients of its parameters wait for synchronisation.

    So do the gradients of a backward that `finalize_backward` has not finalized. The default is True: the step raises
    RuntimeError and names the parameters. With False, a step leaves parameters of `fully_shard` as they are, and takes
    the gradients that FullyShardedDataParallel shows: with NO_SHARD the rank's own.

    Sync: none. Collectives: none.
    Source: torch has no such thing.

    >>> set_detect_unsynchronized_step(False)
    >>> set_detect_unsynchronized_step(True)
    """
    _detection.is_on = mode
