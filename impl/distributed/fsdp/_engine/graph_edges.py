"""Inputs and outputs of a unit in the autograd graph, whose gradients end and begin the unit's backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from impl.distributed.fsdp._params.autograd import differentiable_levels, next_node, register_first_hook
from impl.distributed.fsdp._params.nested import (
    clone_aliases,
    clone_aliases_in_objects,
    tensors_in,
    tensors_in_objects,
)
from impl.distributed.fsdp._params.param_group import Unsharded

_FEW = 16


class InputGradients:
    """Gradients of inputs that a unit's backward still waits for.

    What a rank does follows from their number. Inputs of a graph that no longer exists are counted too, because ranks
    may free a graph at different times. Only their hooks are removed.
    """

    def __init__(self) -> None:
        self._missing = 0
        self._hooks: list[RemovableHandle] = []  # hooks of live tensors, one each
        self._many = _FEW  # number of hooks that triggers the next cleanup
        self._times = WeakTensorKeyDictionary()  # tensor -> how often it was watched
        self._last: list[Tensor] = []  # tensors watched in the running forward

    @property
    def are_complete(self) -> bool:
        return self._missing == 0

    @property
    def have_come(self) -> bool:
        """Whether gradients were expected, and all of them have arrived."""
        return bool(self._hooks) and self.are_complete

    def watch(self, inputs: object, on_gradient: Callable[[bool], None]) -> list[Tensor]:
        """Register `on_gradient` for the gradient of each differentiable tensor in `inputs`. Return these tensors.

        `on_gradient` is called with whether the tensor is a leaf.
        """
        if len(self._hooks) >= self._many:
            self._hooks = [hook for hook in self._hooks if hook.hooks_dict_ref() is not None]
            self._many = max(_FEW, 2 * len(self._hooks))
        self._last = [level for tensor in tensors_in(inputs) for level in differentiable_levels(tensor)]
        for tensor in self._last:
            times = self._times.get(tensor)
            if times is None:
                times = self._times[tensor] = [0]
                # This must be the first hook. A hook of the unit that made the tensor gathers, and needs the memory
                # that this one frees.
                count = self._count_gradient(times, partial(on_gradient, tensor.is_leaf))
                self._hooks.append(register_first_hook(tensor, count))
            times[0] += 1
        self._missing += len(self._last)
        return self._last

    def _count_gradient(self, times: list[int], on_gradient: Callable[[], None]) -> Callable[[Tensor], None]:
        def count(_: Tensor) -> None:
            self._missing -= times[0]
            on_gradient()

        return count

    def end(self) -> None:
        """End the running forward."""
        self._last = []

    def abandon(self) -> None:
        """Undo the watches of the running forward."""
        for tensor in self._last:
            self._times[tensor][0] -= 1
        self._missing -= len(self._last)
        self._last = []

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


@dataclass
class BackwardState:
    """State of the running or next backward. Every backward begins with a new one."""

    inputs: InputGradients = field(default_factory=InputGradients)
    is_awaited: bool = False  # a gradient of the last forward's outputs begins it
    has_begun: bool = False
    first_node: int = 0  # first autograd node that this backward may record
    is_differentiated: bool = False  # a graph of its gradients reads the views until its end
    may_have_gradients: bool = False  # the parameters were unsharded for it
    forward_streams: list[torch.Stream] = field(default_factory=list)  # COMPUTE in its forwards, on a device

    @property
    def has_recorded_nodes(self) -> bool:
        """Whether a graph was recorded since the unit's backward began, as by checkpointing."""
        return next_node() != self.first_node


def hook_gradient_in_backward(unit: weakref.ref[Any], gradient: Tensor | None) -> None:
    """Register a hook on a leaf's gradient, if its backward has reached the unit's model."""
    live_unit = unit()
    if live_unit is not None and live_unit.root.is_in_backward:
        live_unit.hook_gradient(gradient)


def clone_outputs(outputs: object, in_graph: Sequence[Unsharded]) -> tuple[Any, Sequence[Tensor]]:
    """Copy outputs that alias parameters. Return the outputs, and the tensors that they hold in user objects."""
    outputs = clone_aliases({address for params in in_graph for address in params.memory}, outputs)
    if isinstance(outputs, Tensor) or not (objects := tensors_in_objects(outputs)):
        return outputs, ()
    # Permanent memory belongs to the user, whose objects may keep it.
    temporary = {address for params in in_graph if not params.aliases_shard for address in params.memory}
    return outputs, clone_aliases_in_objects(temporary, objects)


def backward_entries(outputs: object, held: Sequence[Tensor], first_node: int) -> list[Tensor]:
    """Return the output tensors whose gradient starts the unit's backward.

    A tensor `held` by a user object counts only if this forward created it.
    """
    entries = [
        level
        for output in tensors_in(outputs)
        for level in differentiable_levels(output)
        if not level.is_leaf
    ]
    for tensor in held:
        for level in differentiable_levels(tensor):
            if level.grad_fn is not None and level.grad_fn._sequence_nr() >= first_node:
                entries.append(level)
    return entries
