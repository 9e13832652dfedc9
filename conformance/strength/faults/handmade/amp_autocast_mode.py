"""Faults in torch.amp.autocast: the region, the state after its exit, and decorated functions."""

from __future__ import annotations

import functools
from typing import Any

import torch

from conformance.strength.faults.fault import OWN, Decorator, by_name, fault_in, in_method


def broken(method: str, thread: str = OWN) -> Decorator:
    """Return a decorator of `fault(original, region, ...)`, which replaces a method of `autocast`."""
    part = f"amp.autocast.{method}" if method != "__init__" else ""
    return fault_in("autocast", "amp.autocast", functools.partial(in_method, method), thread, part=part)


@broken("__exit__", "X-GenGroup/Flow-Factory#186")
def cache_kept_after_exit(original: Any, self: Any, *exc: Any) -> Any:
    """Cached casts outlive the region."""
    # The nesting is one level deeper while the original exits, so that it never sees the outermost exit.
    torch.autocast_increment_nesting()
    try:
        return original(self, *exc)
    finally:
        torch.autocast_decrement_nesting()


@broken("__exit__", "pytorch/pytorch#195488")
def leaks_on_exception(original: Any, self: Any, exc_type: Any, *exc: Any) -> Any:
    """An exception leaves autocast enabled."""
    result = original(self, exc_type, *exc)
    if exc_type is not None:
        torch.set_autocast_enabled(self.device, self._enabled)
    return result


@broken("__exit__", "pytorch/pytorch#194754")
def nesting_leaks_on_exception(original: Any, self: Any, exc_type: Any, *exc: Any) -> Any:
    """An exception leaves the nesting depth increased, so casts are cached permanently."""
    result = original(self, exc_type, *exc)
    if exc_type is not None:
        torch.autocast_increment_nesting()
    return result


@broken("__exit__", "pytorch/pytorch#195488")
def dtype_not_restored(original: Any, self: Any, *exc: Any) -> Any:
    """Exit does not restore the dtype."""
    result = original(self, *exc)
    torch.set_autocast_dtype(self.device, self.fast_dtype)
    return result


@broken("__exit__", "pytorch/pytorch#195488")
def cache_flag_not_restored(original: Any, self: Any, *exc: Any) -> Any:
    """Exit does not restore whether casts are cached."""
    result = original(self, *exc)
    torch.set_autocast_cache_enabled(self._cache_enabled)
    return result


@broken("__init__", "pytorch/pytorch#125103")
@by_name
def default_is_float16(original: Any, self: Any, arguments: dict[str, Any]) -> None:
    """The default dtype is float16 on every device."""
    original(self, **arguments | {"dtype": arguments["dtype"] or torch.float16})


@broken("__init__", "pytorch/pytorch#125103")
@by_name
def default_dtype_fixed(original: Any, self: Any, arguments: dict[str, Any]) -> None:
    """torch.set_autocast_dtype has no effect on later regions."""
    defaults = {"cpu": torch.bfloat16, "cuda": torch.float16}
    original(self, **arguments | {"dtype": arguments["dtype"] or defaults.get(arguments["device_type"])})


@broken("__init__", "pytorch/pytorch#100565")
@by_name
def warns_although_disabled(original: Any, self: Any, arguments: dict[str, Any]) -> None:
    """An unsupported dtype warns in a disabled region too."""
    original(self, **arguments | {"enabled": True})
    self._enabled = self._enabled and arguments["enabled"]


@broken("__init__", "pytorch/pytorch#100565")
@by_name
def unsupported_dtype_stays_on(original: Any, self: Any, arguments: dict[str, Any]) -> None:
    """An unsupported dtype warns but leaves the region enabled."""
    original(self, **arguments)
    self._enabled = self._enabled or (arguments["enabled"] and arguments["device_type"] == "cpu")


@broken("__enter__", "allenai/OLMo#339")
def every_device(original: Any, self: Any) -> Any:
    """A region for CUDA casts on the CPU too."""
    result = original(self)
    torch.set_autocast_enabled("cpu", self.device == "cuda" or torch.is_autocast_enabled("cpu"))
    return result


@broken("__enter__", "pytorch/pytorch#113685")
def cache_never_used(original: Any, self: Any) -> Any:
    """No cast is cached."""
    result = original(self)
    torch.set_autocast_cache_enabled(False)
    return result
