"""Optimizer steps that a flag on the device decides, for any optimizer."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl.kernels import no_grad_fast, to_device
from impl.optim._optimizers import params_of

# The mappings of an optimizer: its attributes, its groups and its states.
_Mapping = MutableMapping[Any, Any]

# Optimizers whose step left a parameter without a state. A later step will not create one either.
_stateless: WeakSet[Optimizer] = WeakSet()


@no_grad_fast
def step_unless_found_inf(optimizer: Optimizer, found_inf: Tensor) -> bool | None:
    """Call `optimizer.step()`, and undo it if `found_inf` is 1.0.

    Undoing restores parameters (but frozen ones without a gradient), states, and the values of groups and attributes.
    Tensors are copied before the step, which takes as much memory again and two more passes over it. A list or an
    object that the step changes in place is not restored.

    The host reads the flag first, and does not call the step if it is set, in these cases: a parameter has no state
    yet; a parameter is on the host and the flag is not; a state is (numbers, and step counters of optimizers that are
    not `capturable`); or `step` was replaced by another function, whose effects may not be undoable. It reads the flag
    afterwards if the step has changed numbers, or has added or removed entries.

    Returns:
        Whether the step was taken, or None if the host does not know.
    Sync: one in the cases above, else none.
    """
    if _host_needs_flag(optimizer, found_inf):
        taken = not found_inf.item()
        if taken:
            optimizer.step()
            if any(not optimizer.state.get(param) for param in _params_with_grad(optimizer)):
                _stateless.add(optimizer)
        return taken
    saved_mappings = [_SavedMapping(mapping) for mapping in _mappings(optimizer)]
    params = [param for param in params_of(optimizer) if param.requires_grad or param.grad is not None]
    old_params = [param.clone() for param in params]
    optimizer.step()
    for param, old in zip(params, old_params, strict=True):
        _restore_if_set(found_inf, param, old)
    changed = [saved for saved in saved_mappings if not saved.restore_tensors_if_set(found_inf)]
    if not changed:
        return None
    taken = not found_inf.item()
    if not taken:
        for saved in changed:
            saved.restore()
    return taken


def _params_with_grad(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for param in params_of(optimizer) if param.grad is not None)


def _step_is_replaced(optimizer: Optimizer) -> bool:
    # Wrappers by schedulers and profilers keep the `__module__` of the method that they wrap.
    owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return getattr(optimizer.step, "__module__", None) != owner.__module__


def _host_needs_flag(optimizer: Optimizer, found_inf: Tensor) -> bool:
    if _step_is_replaced(optimizer):
        return True
    for param in _params_with_grad(optimizer):
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


def _mappings(optimizer: Optimizer) -> Iterator[_Mapping]:
    yield vars(optimizer)
    yield optimizer.state
    yield from (state for state in optimizer.state.values() if isinstance(state, MutableMapping))
    yield from optimizer.param_groups


class _SavedMapping:
    """Contents of a mapping before a step."""

    def __init__(self, mapping: _Mapping) -> None:
        self._mapping = mapping
        self._values = dict(mapping)
        self._copies = {key: value.clone() for key, value in mapping.items() if isinstance(value, Tensor)}

    def restore_tensors_if_set(self, found_inf: Tensor) -> bool:
        """Restore the elements of current tensors if the flag is set. Return whether nothing else has changed."""
        is_complete = self._mapping.keys() == self._values.keys()
        for key, old in self._values.items():
            current = self._mapping.get(key)
            copy = self._copies.get(key)
            if copy is not None and copy.device.type == found_inf.device.type and _is_alike(current, copy):
                _restore_if_set(found_inf, current, copy)
            elif copy is not None:
                is_complete &= current is old and torch.equal(copy, old)
            else:
                is_equal = type(current) in _NUMBERS and type(current) is type(old) and current == old
                is_complete &= current is old or is_equal
        return is_complete

    def restore(self) -> None:
        for key in [*self._mapping]:
            if key not in self._values:
                del self._mapping[key]
        for key, old in self._values.items():
            if key in self._copies:
                old.copy_(self._copies[key])
            self._mapping[key] = old


_NUMBERS = (bool, int, float, complex, str)


def _is_alike(value: object, tensor: Tensor) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.shape == tensor.shape
        and value.dtype is tensor.dtype
        and value.device == tensor.device
    )


def _restore_if_set(found_inf: Tensor, tensor: Tensor, old: Tensor) -> None:
    tensor.copy_(torch.where(to_device(found_inf, tensor.device) != 0, old, tensor))
