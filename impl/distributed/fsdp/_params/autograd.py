"""Queries of autograd, and of the transforms of torch.func around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_level,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.utils.hooks import RemovableHandle

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore[reportAttributeAccessIssue]  no stub
# Number of the next node that autograd creates.
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]  no stub


def register_first_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook that runs before the tensor's earlier hooks."""
    handle = tensor.register_hook(hook)
    # Autograd reads the dictionary, not the separate order of `OrderedDict`.
    hooks = cast("dict[int, Any]", tensor._backward_hooks)
    for earlier in [key for key in hooks if key != handle.id]:
        hooks[earlier] = hooks.pop(earlier)
    return handle


def apply_gradient_hooks(param: Tensor, grad: Any, name: str) -> Any:
    """Apply the hooks of `param` to a gradient that autograd does not accumulate itself, and return the result.

    Raises:
        TypeError: a hook returned neither None nor a tensor of the gradient's type and shape.
    """
    for hook in list((param._backward_hooks or {}).values()):
        result: Any = hook(grad)
        if result is None:
            continue
        if not isinstance(result, type(grad)) or result.shape != grad.shape:
            described = f" of shape {list(result.shape)}" if isinstance(result, Tensor) else ""
            raise TypeError(
                f"a hook of {name} returned a {type(result).__name__}{described}, but its gradient is a "
                f"{type(grad).__name__} of shape {list(grad.shape)}; return None or a tensor like the gradient"
            )
        grad = result
    return grad


def differentiable_levels(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that graphs were recorded for: `tensor`, those that torch.func wraps in it, and their tangents.

    Each level of a transform has its own graph, and a backward enters only the graph of its own level.
    """
    has_tangents = forward_ad._current_level >= 0
    if not has_tangents and not torch._C._are_functorch_transforms_active():
        if tensor.requires_grad:
            yield tensor
        return
    levels = [tensor]
    while levels:
        level = levels.pop()
        if level.requires_grad:
            yield level
        if is_functorch_wrapped_tensor(level):
            levels.append(get_unwrapped(level))
        if has_tangents and not is_batchedtensor(level):
            tangent = _tangent_of(level)
            levels += [] if tangent is None else [tangent]


def _tangent_of(tensor: Tensor) -> Tensor | None:
    """Return the tangent at the tensor's own level, not at the level of a transform inside it."""
    own_level = max(maybe_get_level(tensor), 0)
    with ExitStack() as outside:
        while torch._C._are_functorch_transforms_active() and peek_interpreter_stack().level() > own_level:
            outside.enter_context(temporarily_pop_interpreter_stack())
        return forward_ad.unpack_dual(tensor, level=0).tangent


def is_linearized() -> bool:
    """Return whether torch.func.linearize records this forward, with the parameters as constants."""
    if forward_ad._current_level < 0:
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # pyright: ignore[reportAttributeAccessIssue]  no stub


def runs_backward() -> bool:
    """Return whether this thread runs part of a backward."""
    return _graph_task() != -1


def outside_transforms(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function that manages memory, so that it runs outside the transforms of torch.func.

    A tensor that is created within a transform becomes invalid when the transform ends.
    """

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        is_transformed, is_recorded = torch._C._are_functorch_transforms_active(), is_linearized()
        if not is_transformed and not is_recorded:
            return function(*args, **kwargs)
        with ExitStack() as outside:
            if is_transformed:
                outside.enter_context(torch._C._DisableFuncTorch())
            if is_recorded:
                outside.enter_context(proxy_tensor.disable_proxy_modes_tracing())
            return function(*args, **kwargs)

    return call
