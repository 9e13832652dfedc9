"""What has to be asked of autograd, and of the transforms of torch.func around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

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


def outside_transforms(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """For what deals in memory: what is made within a transform of torch.func wraps its memory, and ends with it."""

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return call
