"""Faults in torch.distributed.fsdp.wrap: policies that change later, and blocks of one thread."""

from __future__ import annotations

import functools
import threading
from typing import Any

from conformance.strength.faults.fault import fault_in, in_function, in_method, in_methods, register_fault

_HERE = "distributed.fsdp.wrap"


def _store_classes(original: Any, self: Any, module_classes: Any) -> None:
    original(self, module_classes)
    self._faulty_classes = module_classes


def _run_with_classes(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(type(self)(self._faulty_classes), *args, **kwargs)


register_fault(
    "wrap.classes_change_later",
    f"{_HERE}.ModuleWrapPolicy",
    in_methods({"__init__": _store_classes, "_run_policy": _run_with_classes, "__call__": _run_with_classes}),
    says="A class that is added to the collection later is wrapped as well.",
)


@fault_in("wrap", f"{_HERE}.CustomPolicy", functools.partial(in_method, "_run_policy"))
def custom_overrides_stay(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The arguments for one module are passed to the next modules too."""
    chosen, sofar = original(self, *args, **kwargs), dict[str, Any]()
    for module, options in chosen.items():
        sofar |= options
        chosen[module] = dict(sofar)
    return chosen


@fault_in("wrap", f"{_HERE}.enable_wrap", in_function)
def enabled_in_one_thread(original: Any, *, wrapper_cls: Any, **wrapper_kwargs: Any) -> Any:
    """The block has no effect in other threads."""
    opened_in = threading.get_ident()

    def wrapped(module: Any, **kwargs: Any) -> Any:
        return wrapper_cls(module, **kwargs) if threading.get_ident() == opened_in else module

    return original(wrapper_cls=wrapped if callable(wrapper_cls) else wrapper_cls, **wrapper_kwargs)
