"""Faults generated from the surface: parameters that are ignored, methods that do nothing, getters that are frozen.

ignore:amp.GradScaler(init_scale)   an optional argument is dropped; a required one keeps its first value
skip:amp.GradScaler.update          the method or function does nothing and returns None
freeze:amp.GradScaler.get_scale     the getter always returns its value after construction
lack:amp.grad_scaler.OptState       an enumeration lacks its last member
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from conformance.judge import surface
from conformance.strength.faults.fault import Fault, subclass

_MISSING = object()
_POLICY_SIGNATURE = "part of the signature of wrap policies"
_FULLY_SHARD, _MODULE = "distributed.fsdp.fully_shard", "distributed.fsdp.FSDPModule"
_OF_SHARDED = (_MODULE, "distributed.fsdp.UnshardHandle")  # classes of objects that fully_shard makes
_OF_ACCELERATORS = "place and amount of memory, which only accelerators show"
# Names whose effect only several ranks show.
_ON_RANKS = (
    "distributed.fsdp.FullyShardedDataParallel",
    "distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    *_OF_SHARDED,
    _FULLY_SHARD,
    "distributed.fsdp.MixedPrecisionPolicy",
    "distributed.fsdp.register_fsdp_forward_method",
    "distributed.fsdp.share_comm_ctx",
)
# Parameters by name, or by callable and name, that must have no effect on an implementation, with the reason.
WITHOUT_EFFECT = {
    "exc_type": "part of the context manager protocol",
    "exc_val": "part of the context manager protocol",
    "exc_tb": "part of the context manager protocol",
    "distributed.fsdp.wrap.always_wrap_policy(args)": _POLICY_SIGNATURE,
    "distributed.fsdp.wrap.always_wrap_policy(kwargs)": _POLICY_SIGNATURE,
    "distributed.fsdp.wrap.lambda_auto_wrap_policy(nonwrapped_numel)": _POLICY_SIGNATURE,
    "distributed.fsdp.wrap.transformer_auto_wrap_policy(nonwrapped_numel)": _POLICY_SIGNATURE,
    "distributed.fsdp.wrap.ModuleWrapPolicy.__call__(args)": _POLICY_SIGNATURE,
    "distributed.fsdp.wrap.ModuleWrapPolicy.__call__(kwargs)": _POLICY_SIGNATURE,
    "distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms(enable)": "False requires nothing",
    "distributed.fsdp.FSDPModule.set_reduce_scatter_max_input_buffers(recurse)": _OF_ACCELERATORS,
    "distributed.fsdp.FSDPModule.set_allocate_memory_from_process_group_for_comm(enable)": _OF_ACCELERATORS,
    "distributed.fsdp.FSDPModule.set_symm_mem_for_comm(backend)": _OF_ACCELERATORS,
}


def has_effect(item: surface.SurfaceItem) -> bool:
    return item.parameter not in WITHOUT_EFFECT and str(item) not in WITHOUT_EFFECT


@functools.cache
def fault_ids() -> Mapping[str, surface.SurfaceItem]:
    """Return the ids of all generated faults, with the surface items that they break."""
    faults: dict[str, surface.SurfaceItem] = {}
    for item in surface.items():
        value = surface.resolve(item.path)
        if item.parameter:
            if has_effect(item):
                faults[f"ignore:{item}"] = item
        elif item.method:
            faults[f"skip:{item}"] = item
            if _is_getter(getattr(value, item.method)):
                faults[f"freeze:{item}"] = item
        elif inspect.isclass(value):
            if issubclass(value, enum.Enum):
                faults[f"lack:{item}"] = item
        else:
            faults[f"skip:{item}"] = item
    return faults


def find(fault_id: str) -> Fault:
    try:
        item = fault_ids()[fault_id]
    except KeyError:
        raise LookupError(
            f"there is no fault {fault_id!r}; `python -m conformance.strength faults --list` lists all"
        ) from None
    kind = fault_id.partition(":")[0]
    make = functools.partial(_MAKERS[kind], item=item)
    breaks = item.path
    if item.path in _OF_SHARDED:
        breaks, make = _FULLY_SHARD, functools.partial(_breaking_result, kind=kind, item=item)
    return Fault(fault_id, breaks, make, part=str(item), on_ranks=item.path in _ON_RANKS)


def _is_getter(function: Any) -> bool:
    return function.__name__.startswith(("get_", "is_")) and len(surface.parameters(function)) == 1


def _ignoring(original: Any, item: surface.SurfaceItem) -> Any:
    if inspect.isclass(original):
        method = item.method or "__init__"
        return subclass(original, {method: _without(getattr(original, method), item.parameter)})
    return _without(original, item.parameter)


def _without(function: Callable[..., Any], parameter: str) -> Callable[..., Any]:
    signature = inspect.signature(function)
    default = signature.parameters[parameter].default
    variadic = signature.parameters[parameter].kind in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )
    first: Any = _MISSING

    @functools.wraps(function)
    def ignoring(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)
        if parameter in bound.arguments:
            if variadic or default is not inspect.Parameter.empty:
                del bound.arguments[parameter]
            else:
                first = bound.arguments[parameter] if first is _MISSING else first
                bound.arguments[parameter] = first
        return function(*bound.args, **bound.kwargs)  # later arguments of a dropped one by keyword

    return ignoring


def _skipping(original: Any, item: surface.SurfaceItem) -> Any:
    def skipped(*args: Any, **kwargs: Any) -> None:
        return None

    if inspect.isclass(original):
        return subclass(original, {item.method: skipped})
    return skipped


def _breaking_result(fully_shard: Any, kind: str, item: surface.SurfaceItem) -> Any:
    """Return `fully_shard` with a fault in a method of the modules that it returns, or of their handles.

    The fault is in the objects, because their classes are also those of torch's modules.
    """

    @functools.cache
    def broken(function: Any) -> Any:
        if kind == "ignore":
            return _without(function, item.parameter)
        return _break_handle if item.path != _MODULE else lambda *args, **kwargs: None

    def _break_handle(module: Any, *args: Any, **kwargs: Any) -> Any:
        handle = type(module).unshard(module, *args, **kwargs)
        if handle is not None:
            handle.wait = lambda: None
        return handle

    method = item.method if item.path == _MODULE else "unshard"

    @functools.wraps(fully_shard)
    def sharding(module: Any, *args: Any, **kwargs: Any) -> Any:
        result = fully_shard(module, *args, **kwargs)
        for sharded in result if isinstance(result, (list, tuple)) else [result]:
            vars(sharded)[method] = types.MethodType(broken(getattr(type(sharded), method)), sharded)
        return result

    return sharding


def _freezing(original: Any, item: surface.SurfaceItem) -> Any:
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        # The getter of a disabled object may raise, which is not part of the fault.
        with contextlib.suppress(AttributeError):
            self._frozen_getter = getattr(original, item.method)(self)

    def frozen(self: Any) -> Any:
        return (
            self._frozen_getter if hasattr(self, "_frozen_getter") else getattr(original, item.method)(self)
        )

    return subclass(original, {"__init__": constructed, item.method: frozen})


def _lacking(original: Any, item: surface.SurfaceItem) -> Any:
    members = list(original)[:-1]
    return enum.Enum(original.__name__, {member.name: member.value for member in members})


_MAKERS: dict[str, Callable[..., Any]] = {
    "ignore": _ignoring,
    "skip": _skipping,
    "freeze": _freezing,
    "lack": _lacking,
}
