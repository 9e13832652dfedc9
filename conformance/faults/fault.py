"""What a fault is, how one enters the catalogue, and the frame that puts it in place.

A fault must work on any subject that mirrors torch, so it uses public names and the hooks that torch documents or
that other libraries override.

Frames are transparent: a call whose arguments the original would not take goes to the original, in whose words it is
refused. Otherwise each fault would be found by the name of its Python function in a TypeError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Makes the broken class or function out of the original one.
Make = Callable[[Any], Any]
# Is called in the original's place: `fault(original, *args, **kwargs)`.
Substitute = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    id: str
    breaks: str  # the public name whose implementation is replaced
    make: Make
    says: str = ""  # what is wrong with it
    thread: str = ""  # where the public can read about it, or "own" for one of ours
    part: str = ""  # the surface item inside `breaks` that it is about, if it is about one
    on_ranks: bool = False  # whether it shows between ranks alone
    wants: str = ""  # a method that torch has not, without which nothing can be broken

    @property
    def about(self) -> str:
        return self.part or self.breaks


ENTERED: dict[str, Fault] = {}


def register_fault(
    fault_id: str, breaks: str, *, says: str, thread: str = "own", **more: Any
) -> Callable[[Make], Make]:
    """Enter a maker of a broken class or function into the catalogue; `more` are other fields of `Fault`."""

    def enter(make: Make) -> Make:
        if fault_id in ENTERED:
            raise ValueError(
                f"two faults are called {fault_id}; an id names one, in whichever file it stands"
            )
        ENTERED[fault_id] = Fault(fault_id, breaks, make, says, thread, **more)
        return make

    return enter


def in_function(fault: Substitute) -> Make:
    """The function with `fault` in its place."""
    return lambda original: _framed(original, fault)


def in_method(method: str, fault: Substitute) -> Make:
    """The class with `fault` in the place of one of its methods."""
    return lambda original: subclass(original, {method: _framed(getattr(original, method), fault)})


def by_name(fault: Callable[[Any, Any, dict[str, Any]], Any]) -> Substitute:
    """`fault(original, self, arguments)`, which finds all that the method is given by name, with its defaults."""

    def substitute(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *named = bound.arguments.items()
        return fault(original, self, dict(named))

    return substitute


def in_methods(faults: Mapping[str, Substitute]) -> Make:
    """The class with faults in the places of several of its methods."""
    return lambda original: subclass(
        original, {name: _framed(getattr(original, name), fault) for name, fault in faults.items()}
    )


def subclass(original: type, members: Mapping[str, Any]) -> type:
    """A subclass under the original's own name, by which a pickle finds it; what is static there is static here."""
    place = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    static = {
        name for name in members if isinstance(inspect.getattr_static(original, name, None), staticmethod)
    }
    own = {name: staticmethod(member) if name in static else member for name, member in members.items()}
    return type(original.__name__, (original,), {**place, **own})


def _framed(original: Callable[..., Any], fault: Substitute) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def framed(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)
        return fault(original, *args, **kwargs)

    return framed
