"""Faults in torch.distributed.fsdp.wrap that outlast a call: what is asked, kept or opened elsewhere."""

from __future__ import annotations

import threading
from typing import Any

from conformance.strength.faults.fault import in_function, in_method, in_methods, register_fault

_HERE = "distributed.fsdp.wrap"


def _remember(original: Any, self: Any, module_classes: Any) -> None:
    original(self, module_classes)
    self._given_classes = module_classes


def _made_anew(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(type(self)(self._given_classes), *args, **kwargs)


def _handing_on(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    chosen, sofar = original(self, *args, **kwargs), dict[str, Any]()
    for module, options in chosen.items():
        sofar |= options
        chosen[module] = dict(sofar)
    return chosen


def _in_one_thread(original: Any, *, wrapper_cls: Any, **wrapper_kwargs: Any) -> Any:
    opened_in = threading.get_ident()

    def wrapped(module: Any, **kwargs: Any) -> Any:
        return wrapper_cls(module, **kwargs) if threading.get_ident() == opened_in else module

    return original(wrapper_cls=wrapped if callable(wrapper_cls) else wrapper_cls, **wrapper_kwargs)


register_fault(
    "wrap.classes_change_later",
    f"{_HERE}.ModuleWrapPolicy",
    says="A class added to the collection later is wrapped as well.",
)(in_methods({"__init__": _remember, "_run_policy": _made_anew, "__call__": _made_anew}))
register_fault(
    "wrap.custom_overrides_stay",
    f"{_HERE}.CustomPolicy",
    says="One module's arguments reach those after it.",
)(in_method("_run_policy", _handing_on))
register_fault(
    "wrap.block_is_the_threads", f"{_HERE}.enable_wrap", says="Other threads do not see the block."
)(in_function(_in_one_thread))
