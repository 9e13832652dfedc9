"""`.grad` that a running backward has reduced, and that stays in place until the backward ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle


class ReducedGrads:
    """`.grad` of parameters whose gradients a running backward has reduced.

    It stays in place until the backward ends, so that the user can clear it if the backward raises. autograd adds
    nothing to it: the next gradient of a loss that reads a parameter directly replaces it.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._grads = [param.grad for param in params]
        self.replaced: list[int] = []  # indices of parameters whose `.grad` autograd has replaced
        # References, because autograd keeps a node only as long as a graph leads to it.
        self._nodes: list[Node] = []
        self._hooks: list[RemovableHandle] = []
        for index, param in enumerate(params):
            if param.requires_grad and param.grad is not None:
                node = get_gradient_edge(param).node
                self._nodes.append(node)
                self._hooks.append(node.register_prehook(partial(self._before_accumulation, index)))

    def _before_accumulation(self, index: int, _: tuple[Tensor, ...]) -> None:
        if self._has_grad(index):
            self._params[index].grad = None
            self.replaced.append(index)

    def _has_grad(self, index: int) -> bool:
        grad = self._params[index].grad
        return grad is not None and grad is self._grads[index]

    def has_others(self) -> bool:
        """Return whether a parameter has another `.grad`."""
        return any(
            param.grad is not None and not self._has_grad(index) for index, param in enumerate(self._params)
        )

    def clear(self) -> None:
        """Set `.grad` to None, except if autograd or the user has replaced it."""
        for index, param in enumerate(self._params):
            if self._has_grad(index):
                param.grad = None

    def release(self) -> None:
        """Remove the hooks, so that autograd adds to `.grad` again."""
        for hook in self._hooks:
            hook.remove()
        self._nodes.clear()
