"""Faults in torch.amp.autocast: instances used again, threads, warnings, refusals, decorated functions."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from typing import Any

import torch

from conformance.faults.fault import by_name, in_methods, register_fault
from conformance.faults.handmade.amp_autocast_mode import broken

REGION = "amp.autocast"
AVAILABLE = "amp.is_autocast_available"


def _entering_keeps_state(original: Any, self: Any) -> Any:
    self._found = (torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device))
    return original(self)


def _leaving_takes_it(original: Any, self: Any, *exc: Any) -> Any:
    result = original(self, *exc)
    if hasattr(self, "_found"):
        torch.set_autocast_enabled(self.device, self._found[0])
        torch.set_autocast_dtype(self.device, self._found[1])
    return result


register_fault(
    "autocast.one_state_an_instance",
    REGION,
    says="an instance keeps one state to restore, however often it is entered",
    thread="NVIDIA/TransformerEngine#2957",
)(in_methods({"__enter__": _entering_keeps_state, "__exit__": _leaving_takes_it}))


def _building_notes_dtype(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self._given = kwargs.get("dtype", args[1] if len(args) > 1 else None)


def _entering_asks_again(original: Any, self: Any) -> Any:
    if self._given is None:
        self.fast_dtype = torch.get_autocast_dtype(self.device)
    return original(self)


register_fault(
    "autocast.default_found_on_entry",
    REGION,
    says="the default dtype is the one that entering finds, inside another region that region's",
    thread="pytorch/pytorch#125103",
)(in_methods({"__init__": _building_notes_dtype, "__enter__": _entering_asks_again}))


@broken("main_thread_only", "__enter__", "a region entered in another thread than the main one casts nothing")
def main_thread_only(original: Any, self: Any) -> Any:
    result = original(self)
    if threading.current_thread() is not threading.main_thread():
        torch.set_autocast_enabled(self.device, False)
    return result


@broken("used_once", "__enter__", "an instance that is entered a third time casts nothing")
def used_once(original: Any, self: Any) -> Any:
    result = original(self)
    self._entered = getattr(self, "_entered", 0) + 1
    if self._entered > 2:
        torch.set_autocast_enabled(self.device, False)
    return result


@broken("sets_every_dtype", "__enter__", "a region for one device sets the dtype of the others")
def sets_every_dtype(original: Any, self: Any) -> Any:
    result = original(self)
    torch.set_autocast_dtype("cuda" if self.device == "cpu" else "cpu", self.fast_dtype)
    return result


@broken(
    "cache_kept_after_disabled", "__exit__", "leaving an outermost region that is disabled keeps the casts"
)
def cache_kept_after_disabled(original: Any, self: Any, *exc: Any) -> Any:
    if self._enabled:
        return original(self, *exc)
    torch.autocast_increment_nesting()
    try:
        return original(self, *exc)
    finally:
        torch.autocast_decrement_nesting()


@broken("disabled_leaves_its_dtype", "__exit__", "leaving a disabled region leaves its dtype behind")
def disabled_leaves_its_dtype(original: Any, self: Any, *exc: Any) -> Any:
    result = original(self, *exc)
    if not self._enabled:
        torch.set_autocast_dtype(self.device, self.fast_dtype)
    return result


@broken("cache_dropped_on_entry", "__enter__", "entering an inner region drops the casts of the outer one")
def cache_dropped_on_entry(original: Any, self: Any) -> Any:
    torch.clear_autocast_cache()
    return original(self)


@broken("cache_on_by_default", "__init__", "without cache_enabled casts are kept, whatever was set before")
@by_name
def cache_on_by_default(original: Any, self: Any, given: dict[str, Any]) -> None:
    kept = given["cache_enabled"]
    original(self, **given | {"cache_enabled": True if kept is None else kept})


@broken("flags_by_truth", "__init__", "enabled and cache_enabled are taken by their truth")
@by_name
def flags_by_truth(original: Any, self: Any, given: dict[str, Any]) -> None:
    kept = given["cache_enabled"]
    flags = {"enabled": bool(given["enabled"]), "cache_enabled": kept if kept is None else bool(kept)}
    original(self, **given | flags)


def warned(category: type[Warning] | None, times: int = 1) -> Any:
    """What building a region warns about comes otherwise."""

    def fault(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            original(self, *args, **kwargs)
        for warning in caught * times:
            warnings.warn(str(warning.message), category or warning.category, stacklevel=3)

    return fault


broken("warns_in_another_category", "__init__", "an unsupported dtype gives a RuntimeWarning")(
    warned(RuntimeWarning)
)
broken("warns_twice", "__init__", "an unsupported dtype warns twice")(warned(None, times=2))


@broken(
    "device_error_of_another_class",
    "__init__",
    "a device_type that is no string raises a TypeError",
    "mosaicml/llm-foundry#302",
)
def device_error_of_another_class(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(self, *args, **kwargs)
    except ValueError as error:
        raise TypeError(str(error)) from None


@broken("devices_taken", "__init__", "a torch.device is taken as device_type", "mosaicml/llm-foundry#302")
def devices_taken(original: Any, self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
    name = device_type.type if isinstance(device_type, torch.device) else device_type
    original(self, name, *args, **kwargs)


@broken("failed_entry_leaves_state", "__enter__", "an entry that fails leaves autocast on")
def failed_entry_leaves_state(original: Any, self: Any) -> Any:
    try:
        return original(self)
    except Exception:
        torch.set_autocast_enabled(self.device, True)
        raise


@broken("inner_call_ends_region", "__call__", "a decorated function that calls itself goes on without casts")
def inner_call_ends_region(original: Any, self: Any, func: Any) -> Any:
    wrapped, depth = original(self, func), []

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        depth.append(1)
        try:
            return wrapped(*args, **kwargs)
        finally:
            depth.pop()
            if depth:
                torch.set_autocast_enabled(self.device, False)

    return run


@broken("decorated_error_leaks", "__call__", "a decorated function that raises leaves its region open")
def decorated_error_leaks(original: Any, self: Any, func: Any) -> Any:
    wrapped = original(self, func)

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except Exception:
            torch.set_autocast_enabled(self.device, self._enabled)
            raise

    return run


@broken("decorated_generators_run_inside", "__call__", "the body of a decorated generator runs in the region")
def decorated_generators_run_inside(original: Any, self: Any, func: Any) -> Any:
    wrapped = original(self, func)
    if not inspect.isgeneratorfunction(func):
        return wrapped

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        with self:
            yield from func(*args, **kwargs)

    return run


@broken("decorated_coroutines_run_inside", "__call__", "the body of a decorated coroutine runs in the region")
def decorated_coroutines_run_inside(original: Any, self: Any, func: Any) -> Any:
    wrapped = original(self, func)
    if not inspect.iscoroutinefunction(func):
        return wrapped

    @functools.wraps(func)
    async def run(*args: Any, **kwargs: Any) -> Any:
        with self:
            return await func(*args, **kwargs)

    return run


@broken("decorator_loses_attributes", "__call__", "attributes of a decorated function are lost")
def decorator_loses_attributes(original: Any, self: Any, func: Any) -> Any:
    wrapped = original(self, func)
    for name in vars(func) if inspect.isfunction(func) else ():
        vars(wrapped).pop(name, None)
    return wrapped


def answering(name: str, answer: bool) -> Any:
    """One device type is answered wrongly."""
    return lambda original, device_type: answer if device_type == name else original(device_type)


def answers(fault_id: str, says: str, fault: Any) -> None:
    make = functools.partial(_answering_instead, fault=fault)
    register_fault(f"is_autocast_available.{fault_id}", AVAILABLE, says=says)(make)


def _answering_instead(original: Any, fault: Any) -> Any:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return original(*args, **kwargs)
        return fault(original, *args)

    return run


answers("meta_is_available", "it says that meta tensors can be autocast", answering("meta", True))
answers("xpu_is_missing", "it says that xpu has no autocast", answering("xpu", False))


def _unknown_is_missing(original: Any, device_type: Any) -> bool:
    try:
        return original(device_type)
    except RuntimeError:
        return False


answers("unknown_is_missing", "device types that torch does not know are answered False", _unknown_is_missing)
answers(
    "index_is_unknown",
    "a device with an index is said to have no autocast",
    lambda original, name: original(name) and ":" not in name,
)


@broken(
    "cache_off_without_gradients",
    "__enter__",
    "a region that is entered while no gradients are recorded keeps no casts",
    "pytorch/pytorch#113685",
)
def cache_off_without_gradients(original: Any, self: Any) -> Any:
    result = original(self)
    if not torch.is_grad_enabled():
        torch.set_autocast_cache_enabled(False)
    return result
