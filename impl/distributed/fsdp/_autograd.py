"""What the order of a graph's nodes and of a tensor's hooks has to be asked of autograd for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore[reportAttributeAccessIssue]  no stub
# The number of the node that autograd makes next.
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]  no stub


def register_first_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook that the tensor's gradient meets before those that are there already."""
    handle = tensor.register_hook(hook)
    # Autograd reads the dictionary, not the order that `OrderedDict` keeps beside it.
    hooks = cast("dict[int, Any]", tensor._backward_hooks)
    for earlier in [key for key in hooks if key != handle.id]:
        hooks[earlier] = hooks.pop(earlier)
    return handle


def runs_backward() -> bool:
    """Whether this thread is running a part of a backward."""
    return _graph_task() != -1
