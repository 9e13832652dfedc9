"""The subject's names, signatures and defaults against torch's, read by introspection.

That a name exists is no clause: what it does is asked elsewhere. Here only its shape is held, so that code written
for torch's signature runs unchanged. More parameters than torch's are welcome where they are optional, and of `impl`
where they are keyword-only too.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

import pytest

from conformance.judge import surface
from conformance.judge.claims import claims
from conformance.judge.compat import COMPAT_NAMES, CompatName
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
    torchs, ours = parameters_of(expected), parameters_of(actual)
    assert reported(ours[: len(torchs)]) == reported(torchs)
    for extra in ours[len(torchs) :]:
        # What torch adds later would take its place; others may see that when it comes.
        assert extra.kind is inspect.Parameter.KEYWORD_ONLY or subject.package != "impl", (
            f"{item}: {extra} is in the way of torch's parameters"
        )
        assert extra.default is not inspect.Parameter.empty, (
            f"{item}: {extra} has no default; torch's callers do not pass it"
        )


def _callable_at(library: Library, item: surface.SurfaceItem) -> Any:
    found = library.find(item.path)
    if not item.method:
        return found
    assert hasattr(found, item.method), f"{library.spec}: {item.path} has no method {item.method}"
    return getattr(found, item.method)


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """A class's are those of its `__init__`: Python 3.13 tells those of the __new__ that deprecates."""
    if isinstance(function, type) and inspect.isfunction(function.__init__):
        return list(inspect.signature(function.__init__).parameters.values())[1:]
    return list(inspect.signature(function).parameters.values())


def reported(parameters: list[inspect.Parameter]) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each; hints are not compared."""
    return [(parameter.name, parameter.kind.name, _plain(parameter.default)) for parameter in parameters]


def _plain(default: Any) -> Any:
    """A dataclass of the library's own by its name and fields."""
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return type(default).__name__, dataclasses.asdict(default)
    return default


_AT_HAND = [row for row in COMPAT_NAMES if not row.on_ranks]


@pytest.mark.parametrize("compat", _AT_HAND, ids=lambda compat: f"{compat.owner}.{compat.name}")
def test_name_that_others_read_exists(subject: Library, compat: CompatName) -> None:
    """Private in torch, but read or overridden by the packages that the row names."""
    made = subject.find(compat.owner)
    value = made(*compat.construct) if isinstance(made, type) else made
    assert hasattr(value, compat.name), f"{compat.owner}.{compat.name} is used by {compat.used_by}"


def test_the_subject_provides_something(subject: Library) -> None:
    assert claims(subject.spec), f"{subject.spec} provides none of {sorted(surface.names())}"
