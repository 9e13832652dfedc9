"""Faults in torch.amp.autocast: the region, the state after its exit, reused instances, threads and refusals."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import torch

from conformance.strength.faults.fault import (
    OWN,
    Decorator,
    by_name,
    fault_in,
    in_method,
    in_methods,
    register_fault,
)


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


def _enter_with_one_state(original: Any, self: Any) -> Any:
    self._found = (torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device))
    return original(self)


def _restore_one_state(original: Any, self: Any, *exc: Any) -> Any:
    result = original(self, *exc)
    if hasattr(self, "_found"):
        torch.set_autocast_enabled(self.device, self._found[0])
        torch.set_autocast_dtype(self.device, self._found[1])
    return result


register_fault(
    "autocast.one_state_per_instance",
    "amp.autocast",
    in_methods({"__enter__": _enter_with_one_state, "__exit__": _restore_one_state}),
    says="An instance restores one state, however often it is entered.",
    thread="NVIDIA/TransformerEngine#2957",
)


def _store_dtype_argument(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self._given = kwargs.get("dtype", args[1] if len(args) > 1 else None)


def _read_default_again(original: Any, self: Any) -> Any:
    if self._given is None:
        self.fast_dtype = torch.get_autocast_dtype(self.device)
    return original(self)


register_fault(
    "autocast.default_read_on_entry",
    "amp.autocast",
    in_methods({"__init__": _store_dtype_argument, "__enter__": _read_default_again}),
    says="The default dtype is read on entry, so inside another region it is that region's.",
    thread="pytorch/pytorch#125103",
)


@broken("__enter__")
def main_thread_only(original: Any, self: Any) -> Any:
    """A region that another thread than the main one enters casts nothing."""
    result = original(self)
    if threading.current_thread() is not threading.main_thread():
        torch.set_autocast_enabled(self.device, False)
    return result


@broken("__init__", "mosaicml/llm-foundry#302")
def device_error_of_another_class(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """A device_type that is not a string raises a TypeError."""
    try:
        original(self, *args, **kwargs)
    except ValueError as error:
        raise TypeError(str(error)) from None


@broken("__init__", "mosaicml/llm-foundry#302")
def devices_accepted(original: Any, self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
    """A torch.device is accepted as device_type."""
    name = device_type.type if isinstance(device_type, torch.device) else device_type
    original(self, name, *args, **kwargs)


@broken("__call__")
def decorated_generators_run_inside(original: Any, self: Any, func: Any) -> Any:
    """The body of a decorated generator runs in the region."""
    wrapped = original(self, func)
    if not inspect.isgeneratorfunction(func):
        return wrapped

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        with self:
            yield from func(*args, **kwargs)

    return run


@broken("__enter__", "pytorch/pytorch#113685")
def cache_off_without_gradients(original: Any, self: Any) -> Any:
    """A region that is entered without grad mode caches no casts."""
    result = original(self)
    if not torch.is_grad_enabled():
        torch.set_autocast_cache_enabled(False)
    return result


@fault_in("older", "cuda.amp.autocast", functools.partial(in_method, "__enter__"), "allenai/OLMo#339")
def cuda_region_on_the_cpu(original: Any, self: Any) -> Any:
    """torch.cuda.amp.autocast casts on the CPU as well."""
    result = original(self)
    torch.set_autocast_enabled("cpu", True)
    return result
