"""Which differentiable inputs of a unit have no gradient yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from impl.distributed.fsdp._autograd import register_first_hook
from impl.distributed.fsdp._nested import tensors_in


class InputGradients:
    """Of the forwards whose backward is not over."""

    def __init__(self) -> None:
        self._open = 0  # inputs whose gradients have not come yet
        self._hooks: list[RemovableHandle] = []

    @property
    def watched(self) -> int:
        return len(self._hooks)

    @property
    def are_complete(self) -> bool:
        return self._open == 0

    def watch(self, given: Any, on_gradient: Callable[[Tensor], None]) -> list[Tensor]:
        """Have `on_gradient` called with the gradient of each differentiable tensor in `given`, which it returns."""
        found = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        for tensor in found:
            # First: the unit that made the tensor gathers by a hook of it, for which memory is to be free.
            self._hooks.append(register_first_hook(tensor, on_gradient))
        self._open += len(found)
        return found

    def note_gradient(self) -> None:
        self._open -= 1

    def forget(self, since: int = 0) -> None:
        """Those behind the first `since`."""
        late = self._hooks[since:]
        del self._hooks[since:]
        for hook in late:
            hook.remove()
        self._open = max(0, self._open - len(late))


def follow_in_backward(unit: weakref.ref[Any], gradient: Tensor | None) -> None:
    """If the backward in which a leaf gets its gradient has reached the unit's model at all."""
    found = unit()
    if found is not None and found.root.is_in_backward:
        found.follow(gradient)
