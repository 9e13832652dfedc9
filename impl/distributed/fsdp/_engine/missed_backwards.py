"""Gradients that a backward left on unsharded parameters, although no unit began its backward.

No hook can be put on outputs inside objects that cannot be searched, and an operator in place may drop a hook. No unit
reduces these gradients, and the next backward would add to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn
from torch.optim.optimizer import Optimizer

from impl.optim._step_checks import register_step_check


class _Unit(Protocol):
    name: str

    @property
    def stepped(self) -> Sequence[nn.Parameter]: ...
    def drop_unseen_gradients(self) -> bool: ...


class _Root(Protocol):
    @property
    def units(self) -> Sequence[_Unit]: ...
    def is_idle(self) -> bool: ...


_roots: WeakSet[Any] = WeakSet()  # roots with a forward since their last backward


def note_forward(root: _Root) -> None:
    register_step_check(_check_step)
    _roots.add(root)


def note_backward(root: _Root) -> None:
    _roots.discard(root)


def check_gradients(units: Sequence[_Unit]) -> None:
    """Drop the gradients that no unit has seen.

    Raises:
        RuntimeError: there were some.
    """
    names = [unit.name for unit in units if unit.drop_unseen_gradients()]
    if names:
        raise RuntimeError(
            f"{', '.join(names)} got gradients in a backward that did not run through the outputs of their forward, so "
            "they were not reduced, and are dropped. Return the outputs as tensors, or in tuples, lists, dicts or "
            "dataclasses, and do not change them in place"
        )


def _check_step(optimizer: Optimizer) -> None:
    for root in [root for root in _roots if root.is_idle()]:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        check_gradients([unit for unit in root.units if any(id(param) in stepped for param in unit.stepped)])
