"""Faults in torch.amp.custom_fwd and custom_bwd."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import Decorator, Substitute, fault_in

FWD, BWD = "amp.custom_fwd", "amp.custom_bwd"


def broken(breaks: str, thread: str) -> Decorator:
    """Return a decorator of `fault(original, function, keywords)`, which replaces custom_fwd or custom_bwd."""
    area = breaks.removeprefix("amp.")
    return fault_in(area, breaks, lambda fault: functools.partial(_decorator, fault=fault), thread)


def _decorator(original: Any, fault: Substitute) -> Any:
    @functools.wraps(original)
    def decorator(function: Any = None, **keywords: Any) -> Any:
        if function is None:
            original(**keywords)
            return functools.partial(decorator, **keywords)
        return functools.wraps(function)(fault(original, function, keywords))

    return decorator


def cast(
    values: tuple[Any, ...], dtype: torch.dtype, is_meant: Callable[[torch.Tensor], bool]
) -> tuple[Any, ...]:
    return tuple(v.to(dtype) if isinstance(v, torch.Tensor) and is_meant(v) else v for v in values)


@broken(FWD, "pytorch/pytorch#36171")
def casts_without_region(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    """Inputs are cast outside any region."""
    decorated, dtype = original(function, **keywords), keywords.get("cast_inputs")

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            args = cast(args, dtype, torch.Tensor.is_floating_point)
        return decorated(ctx, *args, **kwargs)

    return run


@broken(FWD, "pytorch/pytorch#36171")
def casts_float64(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    """float64 inputs are cast too."""
    decorated, dtype = original(function, **keywords), keywords.get("cast_inputs")

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None and torch.is_autocast_enabled(keywords["device_type"]):
            args = cast(args, dtype, lambda tensor: tensor.dtype == torch.float64)
        return decorated(ctx, *args, **kwargs)

    return run


@broken(FWD, "pytorch/pytorch#38487")
def autocast_stays_on(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    """Forward runs with autocast enabled although its inputs were cast."""

    def kept_on(*args: Any, **kwargs: Any) -> Any:
        device = keywords["device_type"]
        was = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, True)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, was)

    return original(function if keywords.get("cast_inputs") is None else kept_on, **keywords)


@broken(FWD, "pytorch/pytorch#38487")
def top_level_only(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    """Tensors inside containers are not cast."""

    # Containers are passed inside namespaces, in which the original does not search for tensors.
    def shown(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(arg.container if isinstance(arg, types.SimpleNamespace) else arg for arg in args)
        return function(ctx, *args, **kwargs)

    decorated = original(shown, **keywords)

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = [
            types.SimpleNamespace(container=arg) if isinstance(arg, (list, dict, tuple)) else arg
            for arg in args
        ]
        return decorated(ctx, *hidden, **kwargs)

    return run


@broken(BWD, "pytorch/pytorch#125186")
def state_of_the_caller(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    """Backward runs in its caller's autocast state."""
    original(function, **keywords)
    return functools.partial(function)


@broken(BWD, "pytorch/pytorch#125186")
def default_dtype(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    """Backward runs in the default dtype, not in forward's."""
    decorated = original(function, **keywords)

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx._dtype = torch.get_autocast_dtype(keywords["device_type"])
        return decorated(ctx, *args, **kwargs)

    return run


@broken(FWD, "pytorch/pytorch#132388")
def writes_on_tensors(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    """Attributes are set on the first argument if it is a tensor."""
    decorated = original(function, **keywords)

    def run(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            args[0]._fwd_used_autocast = torch.is_autocast_enabled(keywords["device_type"])
            args[0]._dtype = torch.get_autocast_dtype(keywords["device_type"])
        return decorated(*args, **kwargs)

    return run


@broken(FWD, "pytorch/pytorch#38487")
def backward_never_on(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    """Backward runs with autocast disabled."""
    decorated = original(function, **keywords)

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        result = decorated(ctx, *args, **kwargs)
        if keywords.get("cast_inputs") is None and not isinstance(ctx, torch.Tensor):
            ctx._fwd_used_autocast = False
        return result

    return run
