"""Definition and registration of faults, and the wrappers that inject them.

A fault must work on any subject that has torch's paths, so it uses public names and the hooks that torch documents or
that other libraries override.

Wrappers are transparent: a call with arguments that the original does not take is passed to the original, which raises
its own TypeError. Otherwise each fault would be detected by the name of its Python function in the error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# A function that makes the broken class or function from the original.
Make = Callable[[Any], Any]
# A function that is called instead of the original, as `fault(original, *args, **kwargs)`.
Substitute = Callable[..., Any]
Decorator = Callable[[Substitute], Substitute]
OWN = "own"  # thread of a bug that was not reported in public


@dataclass(frozen=True)
class Fault:
    id: str
    breaks: str  # the public name whose implementation is replaced
    make: Make
    says: str = ""  # description of the bug
    thread: str = ""  # public report of the bug, or OWN
    part: str = ""  # the broken surface item, if it is inside `breaks`
    on_ranks: bool = False  # whether only several ranks show it
    wants: str = ""  # a method beyond torch that the fault needs

    @property
    def about(self) -> str:
        return self.part or self.breaks


REGISTERED: dict[str, Fault] = {}


def register_fault(
    fault_id: str, breaks: str, make: Make, *, says: str, thread: str = OWN, **more: Any
) -> None:
    """Register a fault. `more` are other fields of `Fault`.

    Raises:
        ValueError: another fault has the id.
    """
    if fault_id in REGISTERED:
        raise ValueError(f"two faults have the id {fault_id}; expected unique ids in all files")
    REGISTERED[fault_id] = Fault(fault_id, breaks, make, says, thread, **more)


def fault_in(
    area: str, breaks: str, make: Callable[[Substitute], Make], thread: str = OWN, **more: Any
) -> Decorator:
    """Return a decorator that registers a function as the fault `area.NAME`. Its docstring describes the bug.

    `make` returns the function's `Make`, like `in_function`. `more` are other fields of `Fault`.
    """

    def register(fault: Substitute) -> Substitute:
        says = inspect.getdoc(fault) or ""
        register_fault(f"{area}.{fault.__name__}", breaks, make(fault), says=says, thread=thread, **more)
        return fault

    return register


def in_function(fault: Substitute) -> Make:
    """Return a maker that replaces a function by `fault`."""
    return lambda original: _wrap(original, fault)


def in_method(method: str, fault: Substitute) -> Make:
    """Return a maker that replaces a method of a class by `fault`."""
    return in_methods({method: fault})


def by_name(fault: Callable[[Any, Any, dict[str, Any]], Any]) -> Substitute:
    """Adapt `fault(original, self, arguments)`, which gets all arguments of a method by name, defaults included."""

    @functools.wraps(fault)
    def substitute(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *named = bound.arguments.items()
        return fault(original, self, dict(named))

    return substitute


def in_methods(faults: Mapping[str, Substitute]) -> Make:
    """Return a maker that replaces several methods of a class by faults."""
    return lambda original: subclass(
        original, {name: _wrap(getattr(original, name), fault) for name, fault in faults.items()}
    )


def subclass(original: type, members: Mapping[str, Any]) -> type:
    """Return a subclass with other members. It has the original's name, for pickling, and keeps methods static."""
    place = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    static = {
        name for name in members if isinstance(inspect.getattr_static(original, name, None), staticmethod)
    }
    own = {name: staticmethod(member) if name in static else member for name, member in members.items()}
    return type(original.__name__, (original,), {**place, **own})


def _wrap(original: Callable[..., Any], fault: Substitute) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)
        return fault(original, *args, **kwargs)

    return wrapper
