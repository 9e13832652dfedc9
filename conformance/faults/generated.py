"""Faults generated from the surface: each public parameter ignored, each method a no-op, each getter frozen.

ignore:amp.GradScaler(init_scale)   an optional argument never arrives; a required one sticks at the first
                                    value it ever got
skip:amp.GradScaler.update          the method or function does nothing and returns None
freeze:amp.GradScaler.get_scale     the getter returns for ever what it returned after construction
lack:amp.grad_scaler.OptState       an enumeration has lost its last member
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from conformance.faults.fault import Fault, subclass
from conformance.judge import surface

_MISSING = object()
_ASKED_LIKE_ANY = "taken so that it can be called like any wrap policy"
_FULLY_SHARD, _MODULE = "distributed.fsdp.fully_shard", "distributed.fsdp.FSDPModule"
_OF_SHARDED = (_MODULE, "distributed.fsdp.UnshardHandle")  # made by fully_shard, never by who uses them
_OF_ACCELERATORS = "where memory lies, and how much of it, which shows on accelerators"
# What does what it does between ranks.
_ON_RANKS = (
    "distributed.fsdp.FullyShardedDataParallel",
    "distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    *_OF_SHARDED,
    _FULLY_SHARD,
    "distributed.fsdp.MixedPrecisionPolicy",
    "distributed.fsdp.register_fsdp_forward_method",
    "distributed.fsdp.share_comm_ctx",
)
# Parameters, or items that are parameters of one callable: nothing an implementation does may depend on these.
WITHOUT_EFFECT = {
    "exc_type": "part of the context manager protocol",
    "exc_val": "part of the context manager protocol",
    "exc_tb": "part of the context manager protocol",
    "distributed.fsdp.wrap.always_wrap_policy(args)": _ASKED_LIKE_ANY,
    "distributed.fsdp.wrap.always_wrap_policy(kwargs)": _ASKED_LIKE_ANY,
    "distributed.fsdp.wrap.lambda_auto_wrap_policy(nonwrapped_numel)": _ASKED_LIKE_ANY,
    "distributed.fsdp.wrap.transformer_auto_wrap_policy(nonwrapped_numel)": _ASKED_LIKE_ANY,
    "distributed.fsdp.wrap.ModuleWrapPolicy.__call__(args)": _ASKED_LIKE_ANY,
    "distributed.fsdp.wrap.ModuleWrapPolicy.__call__(kwargs)": _ASKED_LIKE_ANY,
    "distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms(enable)": "False obliges to nothing",
    "distributed.fsdp.FSDPModule.set_reduce_scatter_max_input_buffers(recurse)": _OF_ACCELERATORS,
    "distributed.fsdp.FSDPModule.set_allocate_memory_from_process_group_for_comm(enable)": _OF_ACCELERATORS,
    "distributed.fsdp.FSDPModule.set_symm_mem_for_comm(backend)": _OF_ACCELERATORS,
}


def has_effect(item: surface.SurfaceItem) -> bool:
    return item.parameter not in WITHOUT_EFFECT and str(item) not in WITHOUT_EFFECT


@functools.cache
def fault_ids() -> Mapping[str, surface.SurfaceItem]:
    """Every generated fault, and the surface item it breaks."""
    found: dict[str, surface.SurfaceItem] = {}
    for item in surface.items():
        value = surface.resolve(item.path)
        if item.parameter:
            if has_effect(item):
                found[f"ignore:{item}"] = item
        elif item.method:
            found[f"skip:{item}"] = item
            if _is_getter(getattr(value, item.method)):
                found[f"freeze:{item}"] = item
        elif inspect.isclass(value):
            if issubclass(value, enum.Enum):
                found[f"lack:{item}"] = item
        else:
            found[f"skip:{item}"] = item
    return found


def find(fault_id: str) -> Fault:
    try:
        item = fault_ids()[fault_id]
    except KeyError:
        raise LookupError(
            f"no fault is called {fault_id!r}; see `python -m conformance.faults --list`"
        ) from None
    kind = fault_id.partition(":")[0]
    make = functools.partial(_MAKERS[kind], item=item)
    breaks = item.path
    if item.path in _OF_SHARDED:
        breaks, make = _FULLY_SHARD, functools.partial(_in_what_is_made, kind=kind, item=item)
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
        # By keyword where possible: an argument left out must not move the later ones forward.
        return function(*_positional(signature, bound), **_by_keyword(signature, bound))

    return ignoring


def _positional(signature: inspect.Signature, bound: inspect.BoundArguments) -> list[Any]:
    names = list(signature.parameters)
    kinds = signature.parameters
    given: list[Any] = []
    for name in names:
        if kinds[name].kind is inspect.Parameter.VAR_POSITIONAL:
            given.extend(bound.arguments.get(name, ()))
        elif kinds[name].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or name not in bound.arguments:
            break
        else:
            given.append(bound.arguments[name])
    return given


def _by_keyword(signature: inspect.Signature, bound: inspect.BoundArguments) -> dict[str, Any]:
    given: dict[str, Any] = {}
    left_out = False
    for name, parameter in signature.parameters.items():
        left_out |= parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name not in bound.arguments
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= bound.arguments.get(name, {})
        elif name in bound.arguments and (left_out or parameter.kind is inspect.Parameter.KEYWORD_ONLY):
            given[name] = bound.arguments[name]
    return given


def _skipping(original: Any, item: surface.SurfaceItem) -> Any:
    def skipped(*args: Any, **kwargs: Any) -> None:
        return None

    if inspect.isclass(original):
        return subclass(original, {item.method: skipped})
    return skipped


def _in_what_is_made(fully_shard: Any, kind: str, item: surface.SurfaceItem) -> Any:
    """With a fault in a method of the modules that are made, or of the handles that those give.

    It stands in the objects themselves: their classes are those of torch's modules too.
    """

    @functools.cache
    def broken(function: Any) -> Any:
        if kind == "ignore":
            return _without(function, item.parameter)
        return _handing_over if item.path != _MODULE else lambda *args, **kwargs: None

    def _handing_over(module: Any, *args: Any, **kwargs: Any) -> Any:
        handle = type(module).unshard(module, *args, **kwargs)
        if handle is not None:
            handle.wait = lambda: None
        return handle

    method = item.method if item.path == _MODULE else "unshard"

    @functools.wraps(fully_shard)
    def sharding(module: Any, *args: Any, **kwargs: Any) -> Any:
        made = fully_shard(module, *args, **kwargs)
        for one in made if isinstance(made, (list, tuple)) else [made]:
            vars(one)[method] = types.MethodType(broken(getattr(type(one), method)), one)
        return made

    return sharding


def _freezing(original: Any, item: surface.SurfaceItem) -> Any:
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        # One that is switched off may have nothing to answer: that is no part of the fault.
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
