"""Faults in torch.amp.autocast: instances used again, threads, refusals, decorated functions, the older spelling."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import torch

from conformance.strength.faults.fault import in_method, in_methods, register_fault
from conformance.strength.faults.handmade.amp_autocast_mode import broken

REGION = "amp.autocast"


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


def region_for_both(original: Any, self: Any) -> Any:
    result = original(self)
    torch.set_autocast_enabled("cpu", True)
    return result


register_fault(
    "older.cuda_region_on_the_cpu",
    "cuda.amp.autocast",
    says="torch.cuda.amp.autocast casts on the CPU as well",
    thread="allenai/OLMo#339",
)(in_method("__enter__", region_for_both))
