"""What torch itself cannot do on some devices: rows of `reference_limits.toml`.

A test of a row's clauses that fails, as the row says, is asked of torch too. Where torch fails in the same way, the
outcome is *reference cannot run here*; unless the subject claims the clause, as it would an extension, and it is not
the device that lacks something.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

from conformance.judge.claims import claimed_extensions
from conformance.judge.clauses import clause_of
from conformance.judge.errors import describe
from conformance.judge.library import load_library
from conformance.judge.outcome import plain_text
from conformance.judge.rows import ReferenceLimit, all_reference_limits
from conformance.ranks import RankFault, RankRaised


class ReferenceCannot(pytest.skip.Exception):
    """The subject fails where torch does, and as torch does."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        row = _row_met(pyfuncitem, error)
        if row is None or not _torch_fails_alike(pyfuncitem, error):
            raise
        raise ReferenceCannot(f"{row.id}: {row.torch_does}") from error


def _row_met(item: pytest.Function, error: BaseException) -> ReferenceLimit | None:
    clause, subject = clause_of(item), item.funcargs.get("subject")
    if not clause or subject is None:
        return None
    is_claimed = clause in claimed_extensions(subject.spec)
    devices = {item.funcargs.get("device"), *(device for _, device in getattr(item, "pools_asked", ()))}
    for row in all_reference_limits().values():
        if not row.is_of_this_torch or (is_claimed and not row.of_the_device):
            continue
        is_here = clause in row.clauses and not devices.isdisjoint(row.devices)
        if is_here and re.search(row.error, _way_of_failing(error)):
            return row
    return None


def _torch_fails_alike(item: pytest.Function, error: BaseException) -> bool:
    if item.funcargs["subject"].spec == "torch":
        return True
    arguments = {  # as pytest calls it
        name: _of_torch(name, item.funcargs[name]) for name in item._fixtureinfo.argnames
    }
    try:
        item.obj(**arguments)
    except (Exception, pytest.fail.Exception) as of_torch:
        return _way_of_failing(of_torch) == _way_of_failing(error)
    return False


def _of_torch(name: str, value: Any) -> Any:
    """A fixture as it would be if torch were judged; one that hands on the subject can tell."""
    if name == "subject":
        return load_library("torch")
    return value.judging(load_library("torch")) if hasattr(value, "judging") else value


def _way_of_failing(error: BaseException) -> str:
    """Without what differs from run to run: how ranks died, and where their peers were."""
    kind = type(error).__name__
    if isinstance(error, RankRaised):
        return plain_text(f"{kind}: {error.scene.failures[0]}")
    return kind if isinstance(error, RankFault) else plain_text(describe(error))
