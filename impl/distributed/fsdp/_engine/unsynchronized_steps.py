"""Check of optimizer steps with unsynchronised gradients, which would use this rank's own gradients or none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from impl._names import describe_names
from impl.distributed.fsdp._params.param_group import ParamGroup
from impl.kernels import dynamo_disable
from impl.optim._optimizers import params_of
from impl.optim._shards import local_part
from impl.optim._step_checks import CheckingHook


class _Detection:
    """Check of the steps of all optimizers, which acts only while gradients are unsynchronised."""

    def __init__(self) -> None:
        self.is_on = True
        self._hook = CheckingHook(self._before_step)
        # Names of the units, by their groups of parameters.
        self._waiting: dict[weakref.ref[ParamGroup], str] = {}
        # The same, of iterations that the user has not finalized.
        self._open: dict[weakref.ref[ParamGroup], str] = {}

    def record(self, groups: Iterable[ParamGroup], unit: str, is_open: bool) -> None:
        for group in groups:
            may_be_unsynchronized = not group.syncs or group.reduction.defers_all_reduce
            is_waiting = may_be_unsynchronized and bool(group.gradients.unsynchronized())
            ref = weakref.ref(group, self._forget)
            for units, is_in in ((self._open, is_open), (self._waiting, is_waiting)):
                if is_in:
                    units[ref] = unit
                else:
                    units.pop(ref, None)
        self._update_hook()

    def _forget(self, group: weakref.ref[ParamGroup]) -> None:
        self._waiting.pop(group, None)
        self._open.pop(group, None)
        self._update_hook()

    def _update_hook(self) -> None:
        self._hook.is_on = bool(self._waiting or self._open)
        if self._hook.is_on:
            self._hook.register()

    @dynamo_disable
    def _before_step(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Check the gradients before the step, or after its closure, which may run the last backward."""
        optimizer_itself, *others = args
        closure = others[0] if others else kwargs.get("closure")
        if not callable(closure):  # a user-defined step may take something else
            self._check_synchronized(optimizer)
            return None

        def closure_with_check() -> Any:
            loss = closure()
            self._check_synchronized(optimizer)
            return loss

        if others:
            return (optimizer_itself, closure_with_check, *others[1:]), kwargs
        return args, kwargs | {"closure": closure_with_check}

    @dynamo_disable
    def _check_synchronized(self, optimizer: Optimizer) -> None:
        if not self.is_on:
            return
        stepped = set(map(id, params_of(optimizer)))
        open_names = _stepped_names(self._open, _trained, stepped)
        waiting_names = _stepped_names(self._waiting, lambda group: group.gradients.unsynchronized(), stepped)
        if not (open_names or waiting_names) or _only_creates_states(optimizer):
            return
        if open_names:
            raise RuntimeError(
                f"the gradients of {open_names} are not finalized, since set_manual_backward_finalization(True) leaves "
                "that to the caller; before the step, call finalize_backward() of the root and wait() of the handle "
                "that it returns with async_op=True, or call set_detect_unsynchronized_step(False) to step anyway"
            )
        raise RuntimeError(
            f"the gradients of {waiting_names} wait to be synchronised, since backwards inside no_sync() or after "
            "set_requires_gradient_sync(False) or set_requires_all_reduce(False) left them; run the last backward "
            "before a step with synchronisation, clear them (fully_shard's by reset_iter_state()) or call "
            "set_detect_unsynchronized_step(False) to step anyway"
        )


def _only_creates_states(optimizer: Optimizer) -> bool:
    """Return whether the learning rates and all gradients are zero.

    torch.distributed.checkpoint.state_dict makes such a step to create the states that a state dict needs.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    if any(rate is None or float(rate) for rate in rates):
        return False
    grads = [param.grad for param in params_of(optimizer) if param.requires_grad]
    return all(grad is not None and not local_part(grad).any() for grad in grads)


_NamedParams = Iterable[tuple[str, Tensor]]


def _trained(group: ParamGroup) -> _NamedParams:
    pairs = zip(group.names, group.stepped, strict=True)
    return [(name, parameter) for name, parameter in pairs if parameter.requires_grad]


def _stepped_names(
    units: Mapping[weakref.ref[ParamGroup], str],
    params_of: Callable[[ParamGroup], _NamedParams],
    stepped: Collection[int],
) -> str:
    """Return the names of the parameters of `params_of` that an optimizer steps, or "" if there are none."""
    names = sorted(
        f"{name} of '{unit}'"
        for ref, unit in list(units.items())
        if (group := ref()) is not None
        for name, parameter in params_of(group)
        if id(parameter) in stepped
    )
    return describe_names(names) if names else ""


_detection = _Detection()


def record_unsynchronized(groups: Iterable[ParamGroup], unit: str, *, is_open: bool = False) -> None:
    """Record at the end of a backward which groups of a unit have unsynchronised gradients.

    Args:
        is_open: the user has to finalize the backward.
    """
    _detection.record(groups, unit, is_open)


def set_detect_unsynchronized_step(mode: bool) -> None:
    """Set whether the step of an optimizer with unsynchronised gradients is an error.

    Gradients of a backward that `finalize_backward` has not finalized count as unsynchronised. The default is True:
    the step raises RuntimeError and names the parameters. With False, a step skips parameters of `fully_shard`, and
    uses `.grad` of FullyShardedDataParallel: with NO_SHARD this rank's own gradients.

    Sync: none. Collectives: none.
    Source: torch has no such function.

    >>> set_detect_unsynchronized_step(False)
    >>> set_detect_unsynchronized_step(True)
    """  # language: the example calls a public name
    _detection.is_on = mode
