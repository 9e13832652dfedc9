"""Limits of torch itself on some devices: the entries of `reference_limits.toml`.

If a test of an entry's clauses fails as the entry says, the test is repeated with torch. If torch fails in the same
way, the outcome is *reference cannot run here*. A subject may claim a clause of an entry, like an extension, unless the
device is what limits torch. Its failures then count.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

from conformance.judge.clauses import clause_of
from conformance.judge.errors import describe
from conformance.judge.files.claims import claimed_extensions
from conformance.judge.files.rows import ReferenceLimit, all_reference_limits
from conformance.judge.library import load_library
from conformance.judge.outcome import plain_text
from conformance.judge.rank_errors import RankFault, RankRaised


class ReferenceCannot(pytest.skip.Exception):
    """Raised when a test fails for the subject in the same way as for torch."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        row = _matching_limit(pyfuncitem, error)
        if row is None or not _torch_fails_alike(pyfuncitem, error):
            raise
        raise ReferenceCannot(f"{row.id}: {row.torch_does}") from error


def _matching_limit(item: pytest.Function, error: BaseException) -> ReferenceLimit | None:
    clause, subject = clause_of(item), item.funcargs.get("subject")
    if not clause or subject is None:
        return None
    is_claimed = clause in claimed_extensions(subject.spec)
    devices = {item.funcargs.get("device"), *(device for _, device in getattr(item, "used_pools", ()))}
    for row in all_reference_limits().values():
        if not row.is_of_this_torch or (is_claimed and not row.of_the_device):
            continue
        is_here = clause in row.clauses and row.holds_on(devices)
        if is_here and re.search(row.error, _describe_failure(error)):
            return row
    return None


def _torch_fails_alike(item: pytest.Function, error: BaseException) -> bool:
    if item.funcargs["subject"].spec == "torch":
        return True
    arguments = {  # the arguments that pytest passes
        name: _of_torch(name, item.funcargs[name]) for name in item._fixtureinfo.argnames
    }
    try:
        item.obj(**arguments)
    except (Exception, pytest.fail.Exception) as of_torch:
        return _describe_failure(of_torch) == _describe_failure(error)
    return False


def _of_torch(name: str, value: Any) -> Any:
    """Return a fixture's value as it would be with torch as subject. Fixtures that use the subject have `judging`."""
    if name == "subject":
        return load_library("torch")
    return value.judging(load_library("torch")) if hasattr(value, "judging") else value


def _describe_failure(error: BaseException) -> str:
    """Return type and text of a failure, without the details of ranks that differ from run to run."""
    kind = type(error).__name__
    if isinstance(error, RankRaised):
        return plain_text(f"{kind}: {error.record.failures[0]}")
    return kind if isinstance(error, RankFault) else plain_text(describe(error))
