"""Faults in torch.amp.autocast: the region, the state after its exit, and decorated functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.strength.faults.fault import Substitute, by_name, in_method, register_fault


def broken(fault_id: str, method: str, says: str, thread: str = "own") -> Callable[[Substitute], Substitute]:
    """Enter `fault(original, region, ...)`, which is called in the place of a method of `autocast`."""

    def enter(fault: Substitute) -> Substitute:
        part = f"amp.autocast.{method}" if method != "__init__" else ""
        enter_into_catalogue = register_fault(
            f"autocast.{fault_id}", "amp.autocast", says=says, thread=thread, part=part
        )
        enter_into_catalogue(in_method(method, fault))
        return fault

    return enter


@broken("cache_kept_after_exit", "__exit__", "kept casts outlive the region", "X-GenGroup/Flow-Factory#186")
def cache_kept_after_exit(original: Any, self: Any, *exc: Any) -> Any:
    # The nesting is one level deeper while the original exits, so that it never sees the outermost exit.
    torch.autocast_increment_nesting()
    try:
        return original(self, *exc)
    finally:
        torch.autocast_decrement_nesting()


@broken(
    "leaks_on_exception",
    "__exit__",
    "state is restored only when no exception was raised",
    "pytorch/pytorch#195488",
)
def leaks_on_exception(original: Any, self: Any, exc_type: Any, *exc: Any) -> Any:
    result = original(self, exc_type, *exc)
    if exc_type is not None:
        torch.set_autocast_enabled(self.device, self._enabled)
    return result


@broken(
    "nesting_leaks_on_exception",
    "__exit__",
    "the depth is counted down on normal exits only, so casts are kept for ever",
    "pytorch/pytorch#194754",
)
def nesting_leaks_on_exception(original: Any, self: Any, exc_type: Any, *exc: Any) -> Any:
    result = original(self, exc_type, *exc)
    if exc_type is not None:
        torch.autocast_increment_nesting()
    return result


@broken("dtype_not_restored", "__exit__", "leaving does not restore the dtype", "pytorch/pytorch#195488")
def dtype_not_restored(original: Any, self: Any, *exc: Any) -> Any:
    result = original(self, *exc)
    torch.set_autocast_dtype(self.device, self.fast_dtype)
    return result


@broken(
    "cache_flag_not_restored",
    "__exit__",
    "leaving does not restore whether casts are kept",
    "pytorch/pytorch#195488",
)
def cache_flag_not_restored(original: Any, self: Any, *exc: Any) -> Any:
    result = original(self, *exc)
    torch.set_autocast_cache_enabled(self._cache_enabled)
    return result


@broken(
    "default_is_float16",
    "__init__",
    "without a dtype every device runs in float16",
    "pytorch/pytorch#125103",
)
@by_name
def default_is_float16(original: Any, self: Any, arguments: dict[str, Any]) -> None:
    original(self, **arguments | {"dtype": arguments["dtype"] or torch.float16})


@broken(
    "default_dtype_fixed",
    "__init__",
    "torch.set_autocast_dtype has no effect on later regions",
    "pytorch/pytorch#125103",
)
@by_name
def default_dtype_fixed(original: Any, self: Any, arguments: dict[str, Any]) -> None:
    defaults = {"cpu": torch.bfloat16, "cuda": torch.float16}
    original(self, **arguments | {"dtype": arguments["dtype"] or defaults.get(arguments["device_type"])})


@broken(
    "warns_although_disabled",
    "__init__",
    "an unsupported dtype warns in a region that is disabled anyway",
    "pytorch/pytorch#100565",
)
@by_name
def warns_although_disabled(original: Any, self: Any, arguments: dict[str, Any]) -> None:
    original(self, **arguments | {"enabled": True})
    self._enabled = self._enabled and arguments["enabled"]


@broken(
    "unsupported_dtype_stays_on",
    "__init__",
    "an unsupported dtype warns but leaves the region enabled",
    "pytorch/pytorch#100565",
)
@by_name
def unsupported_dtype_stays_on(original: Any, self: Any, arguments: dict[str, Any]) -> None:
    original(self, **arguments)
    self._enabled = self._enabled or (arguments["enabled"] and arguments["device_type"] == "cpu")


@broken("every_device", "__enter__", "a region for CUDA casts on the CPU too", "allenai/OLMo#339")
def every_device(original: Any, self: Any) -> Any:
    result = original(self)
    torch.set_autocast_enabled("cpu", self.device == "cuda" or torch.is_autocast_enabled("cpu"))
    return result


@broken("cache_never_used", "__enter__", "no cast is kept", "pytorch/pytorch#113685")
def cache_never_used(original: Any, self: Any) -> Any:
    result = original(self)
    torch.set_autocast_cache_enabled(False)
    return result
