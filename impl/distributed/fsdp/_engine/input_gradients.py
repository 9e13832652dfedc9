"""Which differentiable inputs of a unit have no gradient yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from impl.distributed.fsdp._params.autograd import differentiable_levels, register_first_hook
from impl.distributed.fsdp._params.nested import tensors_in

_FEW = 16


class InputGradients:
    """Gradients of inputs that a unit's backward still waits for.

    What a rank does follows from their number. Inputs of a graph that no longer exists are counted too, because ranks
    may free a graph at different times. Only their hooks are removed.
    """

    def __init__(self) -> None:
        self._missing = 0
        self._hooks: list[RemovableHandle] = []  # one a tensor, of those that are alive
        self._many = _FEW  # hooks, before those that are not are let go
        self._times = WeakTensorKeyDictionary()  # that a tensor was watched
        self._last: list[Tensor] = []  # watched in the forward that runs

    @property
    def are_complete(self) -> bool:
        return self._missing == 0

    @property
    def have_come(self) -> bool:
        """Whether there were any to wait for, and they are complete."""
        return bool(self._hooks) and self.are_complete

    def watch(self, given: Any, on_gradient: Callable[[], None]) -> list[Tensor]:
        """Have `on_gradient` called at the gradient of each differentiable tensor in `given`, which it returns."""
        if len(self._hooks) >= self._many:
            self._hooks = [hook for hook in self._hooks if hook.hooks_dict_ref() is not None]
            self._many = max(_FEW, 2 * len(self._hooks))
        self._last = [level for tensor in tensors_in(given) for level in differentiable_levels(tensor)]
        for tensor in self._last:
            times = self._times.get(tensor)
            if times is None:
                times = self._times[tensor] = [0]
                # First: the unit that made the tensor gathers by a hook of it, for which memory is to be free.
                self._hooks.append(register_first_hook(tensor, self._noting(times, on_gradient)))
            times[0] += 1
        self._missing += len(self._last)
        return self._last

    def _noting(self, times: list[int], on_gradient: Callable[[], None]) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._missing -= times[0]
            on_gradient()

        return note

    def end(self) -> None:
        """The forward that runs."""
        self._last = []

    def abandon(self) -> None:
        """The forward that runs."""
        for tensor in self._last:
            self._times[tensor][0] -= 1
        self._missing -= len(self._last)
        self._last = []

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._last, self._missing = [], [], 0
        self._times = WeakTensorKeyDictionary()


def follow_in_backward(unit: weakref.ref[Any], gradient: Tensor | None) -> None:
    """If the backward in which a leaf gets its gradient has reached the unit's model at all."""
    found = unit()
    if found is not None and found.root.is_in_backward:
        found.follow(gradient)
