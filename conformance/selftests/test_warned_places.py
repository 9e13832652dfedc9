"""Tests of the comparison of the places that warnings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.judge.outcome import differences, observe


def warning_at(stacklevel: int) -> Callable[[], None]:
    """A function of a library that is not the judge's."""
    run: dict[str, Any] = {}
    source = f"import warnings\ndef call(): warnings.warn('told', stacklevel={stacklevel})"
    exec(compile(source, "/elsewhere/library.py", "exec"), run)
    return run["call"]


def test_warning_with_other_place_than_reference_is_reported() -> None:
    inside, at_the_caller = (observe(lambda level=level: warning_at(level)()) for level in (1, 2))
    assert [*differences(inside, at_the_caller)] == []
    [reported] = differences(at_the_caller, inside)
    assert reported.startswith("warned ('UserWarning', 'told') at a line of its own")
