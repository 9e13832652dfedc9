"""Faults in torch.amp.autocast: reused instances, threads, refusals, decorated functions, the older spelling."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import torch

from conformance.strength.faults.fault import fault_in, in_method, in_methods, register_fault
from conformance.strength.faults.handmade.amp_autocast_mode import broken


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
