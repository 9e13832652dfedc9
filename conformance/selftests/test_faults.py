"""Handmade faults: each replaces the right object, and none is detectable by the way it is planted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from conformance.judge.library import Library, load_library
from conformance.judge.outcome import observe
from conformance.strength.faults.fault import in_method, subclass
from conformance.strength.faults.handmade import HANDMADE


def members(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")} | {
        "__qualname__": cls.__qualname__
    }


def test_empty_subclass_replaces_nothing() -> None:
    derived = subclass(dict, {})
    assert members(derived) == members(subclass(dict, {}))
    assert members(derived) != members(subclass(dict, {"__qualname__": "other"}))
    assert members(derived) != members(subclass(dict, {"get": None}))


class _WithStatic:
    @staticmethod
    def twice(value: int) -> int:
        return 2 * value


def test_static_method_stays_static() -> None:
    faulty = in_method("twice", lambda original, value: original(value) + 1)(_WithStatic)
    assert faulty.twice(3) == faulty().twice(3) == 7


@pytest.mark.parametrize("fault_id", list(HANDMADE))
def test_invalid_calls_raise_error_of_original(subject: Library, fault_id: str) -> None:
    """Calls without arguments raise the original's error. Otherwise any test of invalid calls would detect a fault."""
    breaks = HANDMADE[fault_id].breaks
    sound = load_library(subject.package).find(breaks)
    broken = load_library(f"{subject.package}+{fault_id}").find(breaks)
    assert broken is not sound
    names = [name for name, value in vars(broken).items() if inspect.isfunction(value)]
    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [(sound, broken)]
    if inspect.isclass(broken):
        is_wanting = not hasattr(sound, HANDMADE[fault_id].wants or "__init__")
        assert (members(broken) == members(subclass(sound, {}))) is is_wanting, f"{fault_id} replaces nothing"
        pairs = [(getattr(sound, name), getattr(broken, name)) for name in names]
    for original, fault in pairs:
        refused = observe(original).raised
        assert refused is not None
        assert observe(fault).raised == refused


def test_unknown_fault_raises() -> None:
    with pytest.raises(LookupError, match="there is no fault 'forget:everything'"):
        load_library("torch+forget:everything")
