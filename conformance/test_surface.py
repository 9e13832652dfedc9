"""Comparison of the subject's names, signatures and defaults with torch's, by introspection.

These tests have no clauses, because clauses are about behaviour. They make sure that code written for torch's signature
runs unchanged. Additional parameters must be optional and, for `impl`, keyword-only.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

import pytest

from conformance.judge import surface
from conformance.judge.files.claims import claims
from conformance.judge.files.compat import COMPAT_NAMES, CompatName
from conformance.judge.library import Library

_CALLABLES = [
    item for item in surface.items() if not item.parameter and item.path not in surface.CALLED_BY_TORCH
]


@pytest.mark.parametrize("name", surface.names())
def test_name_is_provided(subject: Library, name: str) -> None:
    assert subject.find(name) is not None


@pytest.mark.parametrize("item", _CALLABLES, ids=str)
def test_signature_is_torchs(subject: Library, reference: Library, item: surface.SurfaceItem) -> None:
    expected, actual = _callable_at(reference, item), _callable_at(subject, item)
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        assert [(member.name, member.value) for member in actual] == [
            (member.name, member.value) for member in expected
        ]
        return
    expected_parameters, parameters = parameters_of(expected), parameters_of(actual)
    number = len(expected_parameters)
    assert describe_parameters(parameters[:number]) == describe_parameters(expected_parameters)
    for extra in parameters[number:]:
        # A positional parameter would collide with one that torch adds later. Only `impl` has to avoid that.
        assert extra.kind is inspect.Parameter.KEYWORD_ONLY or subject.package != "impl", (
            f"{item}: {extra} must be keyword-only, because torch may add positional parameters"
        )
        assert extra.default is not inspect.Parameter.empty, (
            f"{item}: {extra} has no default, but callers of torch do not pass it"
        )


def _callable_at(library: Library, item: surface.SurfaceItem) -> Any:
    value = library.find(item.path)
    if not item.method:
        return value
    assert hasattr(value, item.method), f"{library.spec}: {item.path} has no method {item.method}"
    return getattr(value, item.method)


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function, or of a class's `__init__`.

    Python 3.13 returns those of `__new__` for a class that is decorated as deprecated.
    """
    if isinstance(function, type) and inspect.isfunction(function.__init__):
        return list(inspect.signature(function.__init__).parameters.values())[1:]
    return list(inspect.signature(function).parameters.values())


def describe_parameters(parameters: list[inspect.Parameter]) -> list[tuple[str, str, Any]]:
    """Return name, kind and default of each parameter. Type hints are not compared."""
    return [(parameter.name, parameter.kind.name, _plain(parameter.default)) for parameter in parameters]


def _plain(default: Any) -> Any:
    """Return a default. A dataclass is replaced by its name and the fields that differ from their own defaults.

    Each library has its own class, and the test of its constructor compares the defaults of the fields.
    """
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        values = {
            field.name: (getattr(default, field.name), field.default) for field in dataclasses.fields(default)
        }
        return type(default).__name__, {
            name: value for name, (value, usual) in values.items() if value != usual
        }
    return default


_WITHOUT_RANKS = [row for row in COMPAT_NAMES if not row.on_ranks]


@pytest.mark.parametrize("compat", _WITHOUT_RANKS, ids=lambda compat: f"{compat.owner}.{compat.name}")
def test_name_that_others_read_exists(subject: Library, compat: CompatName) -> None:
    """Check a name that is private in torch, but that other packages read or override."""
    owner = subject.find(compat.owner)
    value = owner(*compat.construct) if isinstance(owner, type) else owner
    assert hasattr(value, compat.name), f"{compat.owner}.{compat.name} is used by {compat.used_by}"


def test_subject_provides_any_name(subject: Library) -> None:
    assert claims(subject.spec), f"{subject.spec} provides none of {sorted(surface.names())}"
