"""torch.cpu.amp.autocast, the older spelling."""

from __future__ import annotations

import pytest

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.library import Library
from conformance.strategies.older_spellings import ARGUMENTS, used_as_decorator, used_as_region


@clause("cpu.amp.autocast_mode.autocast.older_spelling")
@pytest.mark.parametrize("arguments", list(ARGUMENTS))
def test_region_matches_torch(compare: Compare, arguments: str) -> None:
    compare(lambda library: used_as_region(library.cpu.amp.autocast, arguments))


@clause("cpu.amp.autocast_mode.autocast.older_spelling")
@pytest.mark.parametrize("arguments", list(ARGUMENTS))
@pytest.mark.parametrize("function", [None, abs], ids=str)
def test_decorator_matches_torch(compare: Compare, arguments: str, function: object) -> None:
    [outcome] = compare(lambda library: used_as_decorator(library.cpu.amp.autocast, arguments, function))
    assert outcome.raised is None


@clause("cpu.amp.autocast_mode.autocast.older_spelling")
def test_newer_arguments_are_refused(subject: Library) -> None:
    """Only the type is compared, because the text names `__new__` or `__init__`, whichever Python called."""
    with pytest.raises(TypeError, match="argument"):
        subject.cpu.amp.autocast("cpu", None, True, True)


@clause("cpu.amp.autocast_mode.autocast.older_spelling")
def test_class_derives_from_newer_autocast(subject: Library) -> None:
    """An `isinstance` check for the newer class accepts instances of the older one."""
    assert issubclass(subject.cpu.amp.autocast, subject.amp.autocast)
