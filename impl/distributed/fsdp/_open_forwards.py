"""The forwards of a unit whose backward may come, and which of their inputs have no gradient yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from impl.distributed.fsdp._autograd import register_first_hook
from impl.distributed.fsdp._nested import tensors_in


class _Entrance:
    """The hook of a forward's outputs: while there is one of them, it is there, and a backward may come."""

    def __init__(self, before_backward: Callable[[Tensor | None], None]) -> None:
        self._before_backward = before_backward

    def __call__(self, gradient: Tensor | None) -> None:
        self._before_backward(gradient)


class _Forward:
    def __init__(self, entrance: _Entrance) -> None:
        self.entrance = weakref.ref(entrance)
        self.awaits_backward = False
        self.hooks: list[RemovableHandle] = []  # of its inputs
        self.missing = 0  # inputs whose gradients have not come yet

    def forget(self) -> None:
        for hook in self.hooks:
            hook.remove()


class OpenForwards:
    """Those whose backward is not over."""

    def __init__(self) -> None:
        self._forwards: list[_Forward] = []
        self._running: _Entrance | None = None

    @property
    def await_backward(self) -> bool:
        """Whether none has begun yet, and there is an output that one could begin with."""
        return any(one.awaits_backward and one.entrance() is not None for one in self._forwards)

    @property
    def have_all_gradients(self) -> bool:
        return all(one.missing == 0 for one in self._forwards)

    def begin(self, before_backward: Callable[[Tensor | None], None]) -> None:
        self._let_go()
        self._running = _Entrance(before_backward)
        self._forwards.append(_Forward(self._running))

    def watch(self, given: Any, on_gradient: Callable[[], None]) -> list[Tensor]:
        """Have `on_gradient` called at the gradient of each differentiable tensor in `given`, which it returns."""
        forward = self._forwards[-1]
        found = [tensor for tensor in tensors_in(given) if tensor.requires_grad]

        def note(_: Tensor | None) -> None:
            forward.missing -= 1
            on_gradient()

        for tensor in found:
            # First: the unit that made the tensor gathers by a hook of it, for which memory is to be free.
            forward.hooks.append(register_first_hook(tensor, note))
        forward.missing += len(found)
        return found

    def end(self, outputs: Iterable[Tensor]) -> None:
        """Of the one that was begun last; a backward begins with these."""
        entrance, self._running = self._running, None
        assert entrance is not None
        for output in outputs:
            output.register_hook(entrance)
            self._forwards[-1].awaits_backward = True

    def abandon(self) -> None:
        """The one that was begun last, if it has not ended."""
        if self._running is not None:
            self._running = None
            self._forwards.pop().forget()

    def note_backward(self) -> None:
        self._let_go()
        for one in self._forwards:
            one.awaits_backward = False

    def forget(self) -> None:
        for one in self._forwards:
            one.forget()
        self._forwards.clear()

    def _let_go(self) -> None:
        """Of those whose outputs are gone, so that no backward can come through them."""
        for gone in [one for one in self._forwards if one.entrance() is None]:
            gone.forget()
            self._forwards.remove(gone)


def follow_in_backward(unit: weakref.ref[Any], gradient: Tensor | None) -> None:
    """If the backward in which a leaf gets its gradient has reached the unit's model at all."""
    found = unit()
    if found is not None and found.root.is_in_backward:
        found.follow(gradient)
