"""Backwards that no unit has seen, found in the next forward or optimizer step.

No hook can be put on outputs inside objects that cannot be searched, and an operator in place may drop a hook. No unit
reduces the gradients that such a backward leaves on unsharded parameters, and the next backward would add to them.

A backward with `inputs=` sharded parameters, or `torch.autograd.grad` of them, leaves no gradients at all, because the
graph has the unsharded ones. If a step without gradients comes between two forwards, the second forward warns. That is
no error, because the user may want no backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer

from impl._names import describe_names
from impl.distributed.fsdp._params.user_warnings import warn_user
from impl.optim._optimizers import params_of
from impl.optim._step_checks import register_step_check


class _Unit(Protocol):
    name: str

    @property
    def awaits_backward(self) -> bool: ...
    @property
    def stepped(self) -> Sequence[nn.Parameter]: ...
    def drop_unseen_gradients(self) -> bool: ...


class _Root(Protocol):
    @property
    def units(self) -> Sequence[_Unit]: ...
    @property
    def awaits_backward(self) -> bool: ...
    def is_idle(self) -> bool: ...
    def has_gradients(self) -> bool: ...


# Roots that ran a forward since the last backward that left gradients, and whether another backward came since.
_had_backward: WeakKeyDictionary[_Root, bool] = WeakKeyDictionary()
# The same roots, if they were stepped without gradients since, with the names of the units that await a backward.
_stepped_without: WeakKeyDictionary[_Root, list[str]] = WeakKeyDictionary()


def note_forward(root: _Root) -> None:
    register_step_check(_check_step)
    _had_backward[root] = False
    names = _stepped_without.pop(root, None)
    if names is not None:
        warn_user(
            "an optimizer stepped sharded parameters that had no gradients, because no backward has computed any since "
            f"the last forward of {describe_names(names)}. backward(inputs=...) and torch.autograd.grad do not reach "
            "sharded parameters; call loss.backward() and read parameter.grad, and freeze the others by "
            "requires_grad_(False)"
        )


def note_backward(root: _Root) -> None:
    _stepped_without.pop(root, None)
    if root.has_gradients():
        _had_backward.pop(root, None)
    elif root in _had_backward:
        _had_backward[root] = True


def check_gradients(units: Sequence[_Unit]) -> None:
    """Drop the gradients that no unit has seen.

    Raises:
        RuntimeError: there were such gradients.
    """
    names = [unit.name for unit in units if unit.drop_unseen_gradients()]
    if names:
        raise RuntimeError(
            f"{', '.join(names)} got gradients in a backward that did not run through the outputs of their forward, so "
            "they were not reduced, and are dropped. Return the outputs as tensors, or in tuples, lists, dicts or "
            "dataclasses, and do not change them in place"
        )


def _check_step(optimizer: Optimizer) -> None:
    idle = [(root, had_backward) for root, had_backward in _had_backward.items() if root.is_idle()]
    params = params_of(optimizer) if idle else []
    stepped = {id(param) for param in params}
    for root, had_backward in idle:
        units = [unit for unit in root.units if any(id(param) in stepped for param in unit.stepped)]
        check_gradients(units)
        # A model whose outputs no graph leads to, such as its input, gets no gradients in any backward. Neither does a
        # unit that the last forward did not run.
        names = [unit.name for unit in units if had_backward or unit.awaits_backward]
        if not names or not (had_backward or root.awaits_backward):
            continue
        has_gradients = any(param.grad is not None for param in params)
        # With original parameters, those without elements on this rank have no gradients.
        if not has_gradients and any(param.requires_grad and param.numel() for param in params):
            _stepped_without[root] = names
