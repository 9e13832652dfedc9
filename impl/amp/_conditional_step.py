"""A step of any optimizer that happens or not by a flag on the device."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl.kernels import no_grad_fast, placed

# What an optimizer keeps things in: its attributes, its groups, its states.
_Keeper = MutableMapping[Any, Any]

# Of these a step has left a parameter without a state: there is none to be made.
_stateless: WeakSet[Optimizer] = WeakSet()


@no_grad_fast
def step_unless(optimizer: Optimizer, found_inf: Tensor) -> bool | None:
    """Call `optimizer.step()`; where `found_inf` is 1.0, all that it keeps is put back as it was.

    That is its parameters, but for frozen ones without a gradient, its states, and the values of its groups and
    attributes. What lies on the device is copied first, which takes as much memory again and two more passes over it.
    The host has to know the flag, and the step is not called where it is set, while a parameter may yet get its state,
    for parameters that lie on the host and the flag does not, for states that do (numbers, and step counters of
    optimizers that are not `capturable`), and where somebody has put another function in the place of `step`, of which
    may come what cannot be put back. It asks
    for the flag after a step that has changed what only the host can put back: numbers, and what there is. A list or an
    object that is changed in place is not seen.

    Returns:
        Whether the step was taken, None where the host does not know.
    Sync: none, but in these two cases.
    """
    if _must_be_known(optimizer, found_inf):
        taken = not found_inf.item()
        if taken:
            optimizer.step()
            if any(not optimizer.state.get(param) for param in _stepped(optimizer)):
                _stateless.add(optimizer)
        return taken
    keepers = [_Kept(keeper) for keeper in _keepers(optimizer)]
    params = [param for param in _params(optimizer) if param.requires_grad or param.grad is not None]
    before = [param.clone() for param in params]
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        _put_back_where(found_inf, param, old)
    changed = [kept for kept in keepers if not kept.put_back_where(found_inf)]
    if not changed:
        return None
    taken = not found_inf.item()
    if not taken:
        for kept in changed:
            kept.put_back()
    return taken


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _stepped(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for param in _params(optimizer) if param.grad is not None)


def _step_is_replaced(optimizer: Optimizer) -> bool:
    """Wrappers of schedulers and profilers have the module of what they wrap."""
    owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return getattr(optimizer.step, "__module__", None) != owner.__module__


def _must_be_known(optimizer: Optimizer, found_inf: Tensor) -> bool:
    if _step_is_replaced(optimizer):
        return True
    for param in _stepped(optimizer):
        state = optimizer.state.get(param)
        if param.is_cpu and not found_inf.is_cpu:
            return True
        if not state and optimizer not in _stateless:
            return True
        if any(
            not isinstance(value, Tensor) or value.device != param.device for value in (state or {}).values()
        ):
            return True
    return False


def _keepers(optimizer: Optimizer) -> Iterator[_Keeper]:
    yield vars(optimizer)
    yield optimizer.state
    yield from (state for state in optimizer.state.values() if isinstance(state, MutableMapping))
    yield from optimizer.param_groups


class _Kept:
    """What stood in a mapping before a step."""

    def __init__(self, keeper: _Keeper) -> None:
        self._keeper = keeper
        self._values = dict(keeper)
        self._copies = {key: value.clone() for key, value in keeper.items() if isinstance(value, Tensor)}

    def put_back_where(self, found_inf: Tensor) -> bool:
        """Put numbers of tensors back, in the tensors that stand there now; False if something else has changed."""
        is_all = self._keeper.keys() == self._values.keys()
        for key, old in self._values.items():
            now = self._keeper.get(key)
            copy = self._copies.get(key)
            if copy is not None and copy.device.type == found_inf.device.type and _is_alike(now, copy):
                _put_back_where(found_inf, now, copy)
            elif copy is not None:
                is_all &= now is old and torch.equal(copy, old)
            else:
                is_all &= now is old or (type(now) in _NUMBERS and type(now) is type(old) and now == old)
        return is_all

    def put_back(self) -> None:
        for key in [*self._keeper]:
            if key not in self._values:
                del self._keeper[key]
        for key, old in self._values.items():
            if key in self._copies:
                old.copy_(self._copies[key])
            self._keeper[key] = old


_NUMBERS = (bool, int, float, complex, str)


def _is_alike(one: Any, other: Tensor) -> TypeGuard[Tensor]:
    return (
        isinstance(one, Tensor)
        and one.shape == other.shape
        and one.dtype is other.dtype
        and one.device == other.device
    )


def _put_back_where(found_inf: Tensor, tensor: Tensor, old: Tensor) -> None:
    tensor.copy_(torch.where(placed(found_inf, tensor.device) != 0, old, tensor))
