"""Faults in torch.amp.custom_fwd and custom_bwd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import register_fault

FWD, BWD = "amp.custom_fwd", "amp.custom_bwd"
# `fault(original, function, keywords)` decorates the function instead of the original, which it may call.
Decorating = Callable[[Any, Any, dict[str, Any]], Any]


def broken(fault_id: str, breaks: str, says: str, thread: str) -> Callable[[Decorating], Decorating]:
    """Enter a fault of what custom_fwd or custom_bwd makes of a function."""

    def enter(fault: Decorating) -> Decorating:
        register_fault(fault_id, breaks, says=says, thread=thread)(functools.partial(_decorator, fault=fault))
        return fault

    return enter


def _decorator(original: Any, fault: Decorating) -> Any:
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


@broken("custom_fwd.casts_without_region", FWD, "inputs are cast outside any region", "pytorch/pytorch#36171")
def casts_without_region(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    decorated, dtype = original(function, **keywords), keywords.get("cast_inputs")

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            args = cast(args, dtype, torch.Tensor.is_floating_point)
        return decorated(ctx, *args, **kwargs)

    return run


@broken("custom_fwd.casts_float64", FWD, "float64 inputs are cast too", "pytorch/pytorch#36171")
def casts_float64(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    decorated, dtype = original(function, **keywords), keywords.get("cast_inputs")

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None and torch.is_autocast_enabled(keywords["device_type"]):
            args = cast(args, dtype, lambda tensor: tensor.dtype == torch.float64)
        return decorated(ctx, *args, **kwargs)

    return run


@broken(
    "custom_fwd.autocast_stays_on",
    FWD,
    "forward runs with autocast on although its inputs were cast",
    "pytorch/pytorch#38487",
)
def autocast_stays_on(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    def kept_on(*args: Any, **kwargs: Any) -> Any:
        device = keywords["device_type"]
        was = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, True)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, was)

    return original(function if keywords.get("cast_inputs") is None else kept_on, **keywords)


class _Hidden:
    """A replacement of a container while the original searches for tensors to cast."""

    def __init__(self, container: Any) -> None:
        self.container = container


@broken("custom_fwd.top_level_only", FWD, "tensors inside containers are not cast", "pytorch/pytorch#38487")
def top_level_only(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    def shown(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return function(ctx, *[a.container if isinstance(a, _Hidden) else a for a in args], **kwargs)

    decorated = original(shown, **keywords)

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = [_Hidden(a) if isinstance(a, (list, dict, tuple)) else a for a in args]
        return decorated(ctx, *hidden, **kwargs)

    return run


@broken(
    "custom_bwd.state_of_the_caller",
    BWD,
    "backward runs in the state of whoever calls it",
    "pytorch/pytorch#125186",
)
def state_of_the_caller(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    original(function, **keywords)
    return functools.partial(function)


@broken(
    "custom_bwd.default_dtype",
    BWD,
    "backward runs in the default dtype and not in forward's",
    "pytorch/pytorch#125186",
)
def default_dtype(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    decorated = original(function, **keywords)

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx._dtype = torch.get_autocast_dtype(keywords["device_type"])
        return decorated(ctx, *args, **kwargs)

    return run


@broken("custom_fwd.writes_on_tensors", FWD, "attributes are set on a first tensor", "pytorch/pytorch#132388")
def writes_on_tensors(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    decorated = original(function, **keywords)

    def run(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            args[0]._fwd_used_autocast = torch.is_autocast_enabled(keywords["device_type"])
            args[0]._dtype = torch.get_autocast_dtype(keywords["device_type"])
        return decorated(*args, **kwargs)

    return run


@broken("custom_fwd.backward_never_on", FWD, "backward runs with autocast off", "pytorch/pytorch#38487")
def backward_never_on(original: Any, function: Any, keywords: dict[str, Any]) -> Any:
    decorated = original(function, **keywords)

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        result = decorated(ctx, *args, **kwargs)
        if keywords.get("cast_inputs") is None and not isinstance(ctx, torch.Tensor):
            ctx._fwd_used_autocast = False
        return result

    return run
