"""Bugs planted in torch.amp.autocast_mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from conformance.plants.catalogue import planted

AUTOCAST = "amp.autocast"


def subclass(original: type, **methods: Any) -> type:
    return type(original.__name__, (original,), {"__module__": original.__module__, **methods})


@planted(
    "autocast.cache_kept_after_exit",
    breaks=AUTOCAST,
    says="kept casts outlive the region",
    thread="X-GenGroup/Flow-Factory#186",
)
def cache_kept_after_exit(original: type) -> type:
    def leave(self: Any, *exc: Any) -> Any:
        # One level deeper while the original leaves: it never sees the outermost exit.
        torch.autocast_increment_nesting()
        try:
            return original.__exit__(self, *exc)
        finally:
            torch.autocast_decrement_nesting()

    return subclass(original, __exit__=leave)


@planted(
    "autocast.leaks_on_exception",
    breaks=AUTOCAST,
    says="state is restored only when no exception was raised",
    thread="pytorch/pytorch#195488",
)
def leaks_on_exception(original: type) -> type:
    def leave(self: Any, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        result = original.__exit__(self, exc_type, exc_val, exc_tb)
        if exc_type is not None:
            torch.set_autocast_enabled(self.device, self._enabled)
        return result

    return subclass(original, __exit__=leave)


@planted(
    "autocast.nesting_leaks_on_exception",
    breaks=AUTOCAST,
    says="the depth is counted down on normal exits only, so casts are kept for ever",
    thread="pytorch/pytorch#194754",
)
def nesting_leaks_on_exception(original: type) -> type:
    def leave(self: Any, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        result = original.__exit__(self, exc_type, exc_val, exc_tb)
        if exc_type is not None:
            torch.autocast_increment_nesting()
        return result

    return subclass(original, __exit__=leave)


@planted(
    "autocast.swallows_exceptions",
    breaks=AUTOCAST,
    says="an exception in the region is swallowed",
    thread="own",
)
def swallows_exceptions(original: type) -> type:
    def leave(self: Any, *exc: Any) -> bool:
        original.__exit__(self, *exc)
        return True

    return subclass(original, __exit__=leave)


@planted(
    "autocast.dtype_not_restored",
    breaks=AUTOCAST,
    says="leaving does not restore the dtype",
    thread="pytorch/pytorch#195488",
)
def dtype_not_restored(original: type) -> type:
    def leave(self: Any, *exc: Any) -> Any:
        result = original.__exit__(self, *exc)
        torch.set_autocast_dtype(self.device, self.fast_dtype)
        return result

    return subclass(original, __exit__=leave)


@planted(
    "autocast.cache_flag_not_restored",
    breaks=AUTOCAST,
    says="leaving does not restore whether casts are kept",
    thread="pytorch/pytorch#195488",
)
def cache_flag_not_restored(original: type) -> type:
    def leave(self: Any, *exc: Any) -> Any:
        result = original.__exit__(self, *exc)
        torch.set_autocast_cache_enabled(self._cache_enabled)
        return result

    return subclass(original, __exit__=leave)


@planted(
    "autocast.restores_disabled",
    breaks=AUTOCAST,
    says="leaving switches autocast off whatever it found",
    thread="own",
)
def restores_disabled(original: type) -> type:
    def leave(self: Any, *exc: Any) -> Any:
        result = original.__exit__(self, *exc)
        torch.set_autocast_enabled(self.device, False)
        return result

    return subclass(original, __exit__=leave)


def constructor(change: Callable[..., tuple[Any, ...]]) -> Callable[[type], type]:
    """A plant that alters the constructor's arguments."""

    def make(original: type) -> type:
        def construct(
            self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            original.__init__(self, *change(device_type, dtype, enabled, cache_enabled))

        return subclass(original, __init__=construct)

    return make


@planted(
    "autocast.default_is_float16",
    breaks=AUTOCAST,
    says="without a dtype every device runs in float16",
    thread="pytorch/pytorch#125103",
)
def default_is_float16(original: type) -> type:
    return constructor(
        lambda device, dtype, enabled, cache: (device, dtype or torch.float16, enabled, cache)
    )(original)


@planted(
    "autocast.default_dtype_fixed",
    breaks=AUTOCAST,
    says="torch.set_autocast_dtype has no effect on later regions",
    thread="pytorch/pytorch#125103",
)
def default_dtype_fixed(original: type) -> type:
    defaults = {"cpu": torch.bfloat16, "cuda": torch.float16}
    return constructor(
        lambda device, dtype, enabled, cache: (device, dtype or defaults.get(device), enabled, cache)
    )(original)


@planted(
    "autocast.warns_although_disabled",
    breaks=AUTOCAST,
    says="an unsupported dtype warns in a region that is disabled anyway",
    thread="pytorch/pytorch#100565",
)
def warns_although_disabled(original: type) -> type:
    def construct(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        original.__init__(self, device_type, dtype, True, cache_enabled)
        self._enabled = self._enabled and enabled

    return subclass(original, __init__=construct)


@planted(
    "autocast.unsupported_dtype_stays_on",
    breaks=AUTOCAST,
    says="an unsupported dtype warns but leaves the region enabled",
    thread="pytorch/pytorch#100565",
)
def unsupported_dtype_stays_on(original: type) -> type:
    def construct(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        original.__init__(self, device_type, dtype, enabled, cache_enabled)
        self._enabled = self._enabled or (enabled and device_type == "cpu")

    return subclass(original, __init__=construct)


@planted(
    "autocast.every_device",
    breaks=AUTOCAST,
    says="a region for CUDA casts on the CPU too",
    thread="allenai/OLMo#339",
)
def every_device(original: type) -> type:
    def enter(self: Any) -> Any:
        result = original.__enter__(self)
        torch.set_autocast_enabled("cpu", self.device == "cuda" or torch.is_autocast_enabled("cpu"))
        return result

    return subclass(original, __enter__=enter)


@planted(
    "autocast.disabled_does_not_disable",
    breaks=AUTOCAST,
    says="a disabled region inside an enabled one leaves casting on",
    thread="own",
)
def disabled_does_not_disable(original: type) -> type:
    def enter(self: Any) -> Any:
        was = torch.is_autocast_enabled(self.device)
        result = original.__enter__(self)
        torch.set_autocast_enabled(self.device, was or self._enabled)
        return result

    return subclass(original, __enter__=enter)


@planted(
    "autocast.cache_never_used", breaks=AUTOCAST, says="no cast is kept", thread="pytorch/pytorch#113685"
)
def cache_never_used(original: type) -> type:
    def enter(self: Any) -> Any:
        result = original.__enter__(self)
        torch.set_autocast_cache_enabled(False)
        return result

    return subclass(original, __enter__=enter)


@planted(
    "autocast.cache_cleared_at_every_exit",
    breaks=AUTOCAST,
    says="leaving an inner region drops the outer one's casts",
    thread="own",
)
def cache_cleared_at_every_exit(original: type) -> type:
    def leave(self: Any, *exc: Any) -> Any:
        torch.clear_autocast_cache()
        return original.__exit__(self, *exc)

    return subclass(original, __exit__=leave)


@planted(
    "autocast.enter_returns_nothing",
    breaks=AUTOCAST,
    says="`with autocast(...) as region` binds None",
    thread="own",
)
def enter_returns_nothing(original: type) -> type:
    def enter(self: Any) -> None:
        original.__enter__(self)

    return subclass(original, __enter__=enter)


@planted(
    "autocast.decorates_once",
    breaks=AUTOCAST,
    says="a decorated function runs in a region the first time only",
    thread="own",
)
def decorates_once(original: type) -> type:
    def decorate(self: Any, func: Any) -> Any:
        wrapped, calls = original.__call__(self, func), []

        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return (wrapped if len(calls) == 1 else func)(*args, **kwargs)

        return run

    return subclass(original, __call__=decorate)


@planted(
    "autocast.decorator_loses_name",
    breaks=AUTOCAST,
    says="a decorated function is called by the wrapper's name",
    thread="own",
)
def decorator_loses_name(original: type) -> type:
    return subclass(original, __call__=lambda self, func: functools.partial(original.__call__(self, func)))


FWD, BWD = "amp.custom_fwd", "amp.custom_bwd"


def each_call(change: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A plant in the function that custom_fwd or custom_bwd returns: `change(decorated, original function)`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def decorator(function: Any = None, **keywords: Any) -> Any:
            if function is None:
                original(**keywords)
                return functools.partial(decorator, **keywords)
            return functools.wraps(function)(change(original(function, **keywords), function, keywords))

        return decorator

    return make


@planted(
    "custom_fwd.casts_without_region",
    breaks=FWD,
    says="inputs are cast outside any region",
    thread="pytorch/pytorch#36171",
)
def casts_without_region(original: Any) -> Any:
    def change(decorated: Any, function: Any, keywords: dict[str, Any]) -> Any:
        dtype = keywords.get("cast_inputs")

        def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            if dtype is not None:
                args = tuple(
                    a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
                )
            return decorated(ctx, *args, **kwargs)

        return run

    return each_call(change)(original)


@planted(
    "custom_fwd.autocast_stays_on",
    breaks=FWD,
    says="forward runs with autocast on although its inputs were cast",
    thread="pytorch/pytorch#38487",
)
def autocast_stays_on(original: Any) -> Any:
    def change(decorated: Any, function: Any, keywords: dict[str, Any]) -> Any:
        def kept_on(*args: Any, **kwargs: Any) -> Any:
            device = keywords["device_type"]
            was = torch.is_autocast_enabled(device)
            torch.set_autocast_enabled(device, True)
            try:
                return function(*args, **kwargs)
            finally:
                torch.set_autocast_enabled(device, was)

        if keywords.get("cast_inputs") is None:
            return decorated
        return original(kept_on, **keywords)

    return each_call(change)(original)


@planted(
    "custom_fwd.top_level_only",
    breaks=FWD,
    says="tensors inside containers are not cast",
    thread="pytorch/pytorch#38487",
)
def top_level_only(original: Any) -> Any:
    def change(decorated: Any, function: Any, keywords: dict[str, Any]) -> Any:
        def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = [a for a in args if isinstance(a, (list, dict, tuple))]
            inner = original(
                lambda c, *a, **k: function(
                    c, *[hidden[i.n] if isinstance(i, _Hidden) else i for i in a], **k
                ),
                **keywords,
            )
            return inner(
                ctx, *[_Hidden(hidden.index(a)) if any(a is h for h in hidden) else a for a in args], **kwargs
            )

        return run

    return each_call(change)(original)


class _Hidden:
    """Stands for a container while the original looks for tensors to cast."""

    def __init__(self, n: int) -> None:
        self.n = n


@planted(
    "custom_fwd.casts_float64", breaks=FWD, says="float64 inputs are cast too", thread="pytorch/pytorch#36171"
)
def casts_float64(original: Any) -> Any:
    def change(decorated: Any, function: Any, keywords: dict[str, Any]) -> Any:
        dtype = keywords.get("cast_inputs")

        def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            if dtype is not None and torch.is_autocast_enabled(keywords["device_type"]):
                args = tuple(
                    a.to(dtype) if isinstance(a, torch.Tensor) and a.dtype == torch.float64 else a
                    for a in args
                )
            return decorated(ctx, *args, **kwargs)

        return run

    return each_call(change)(original)


@planted(
    "custom_bwd.state_of_the_caller",
    breaks=BWD,
    says="backward runs in the state of whoever calls it",
    thread="pytorch/pytorch#125186",
)
def state_of_the_caller(original: Any) -> Any:
    return each_call(lambda decorated, function, keywords: functools.partial(function))(original)


@planted(
    "custom_bwd.default_dtype",
    breaks=BWD,
    says="backward runs in the default dtype and not in forward's",
    thread="pytorch/pytorch#125186",
)
def default_dtype(original: Any) -> Any:
    def change(decorated: Any, function: Any, keywords: dict[str, Any]) -> Any:
        def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            ctx._dtype = torch.get_autocast_dtype(keywords["device_type"])
            return decorated(ctx, *args, **kwargs)

        return run

    return each_call(change)(original)
