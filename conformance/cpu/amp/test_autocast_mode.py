"""torch.cpu.amp.autocast, the older spelling."""

from __future__ import annotations

import pytest

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.strategies.older_spellings import ARGUMENTS, used_as_decorator, used_as_region


@clause("cpu.amp.autocast_mode.autocast.older_spelling")
@pytest.mark.parametrize("arguments", list(ARGUMENTS))
def test_as_a_region(compare: Compare, arguments: str) -> None:
    compare(lambda library: used_as_region(library.cpu.amp.autocast, arguments))


@clause("cpu.amp.autocast_mode.autocast.older_spelling")
@pytest.mark.parametrize("arguments", list(ARGUMENTS))
@pytest.mark.parametrize("function", [None, abs], ids=str)
def test_as_a_decorator(compare: Compare, arguments: str, function: object) -> None:
    compare(lambda library: used_as_decorator(library.cpu.amp.autocast, arguments, function))


@clause("cpu.amp.autocast_mode.autocast.older_spelling")
def test_newer_arguments_are_refused(subject: Library) -> None:
    """The text names whichever of `__new__` and `__init__` Python asked, so only the type is held."""
    with pytest.raises(TypeError):
        subject.cpu.amp.autocast("cpu", None, True, True)


@clause("cpu.amp.autocast_mode.autocast.older_spelling")
def test_is_an_autocast(subject: Library) -> None:
    """Code that asks isinstance for the newer class takes the older one too."""
    assert issubclass(subject.cpu.amp.autocast, subject.amp.autocast)
