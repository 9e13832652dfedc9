"""Queries of autograd, and of the transforms of torch.func around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

from impl.distributed.fsdp._params.user_warnings import warn_user

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Name of the hook that torch registers for each tensor of a hook that waits for all gradients.
_HOOK_OF_ALL = "register_multi_grad_hook.<locals>.get_inner_hook.<locals>.inner_hook"

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


def call_hook(hook: Callable[[Any], Any], tensor: Tensor, name: str) -> Any:
    """Call a hook that autograd does not run itself. A note on its error names the parameter."""
    try:
        return hook(tensor)
    except Exception as error:
        error.add_note(f"raised in a hook of {name}")
        raise


def share_hooks(source: Tensor, target: Tensor) -> None:
    """Give `target` the hooks of `source`, in the same dictionaries, so that handles can still remove them."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def apply_gradient_hooks(hooks: Mapping[int, Any] | None, grad: Any, name: str) -> Any:
    """Apply a parameter's hooks to a gradient that autograd does not accumulate itself, and return the result.

    Raises:
        TypeError: a hook returned neither None nor a tensor of the gradient's type and shape.
    """
    for hook in list((hooks or {}).values()):
        if getattr(hook, "__qualname__", "") == _HOOK_OF_ALL:
            # This hook would keep the gradient, because its count never includes sharded parameters.
            warn_user(
                "register_multi_grad_hook(mode='all') gets no gradients of sharded parameters; use mode='any', or "
                "register_hook for each parameter"
            )
            continue
        result: Any = call_hook(hook, grad, name)
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
