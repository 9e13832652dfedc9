"""`conformance_claims.toml`: what a package says of itself to its judge. Every key may be left out.

    claims = ["amp.GradScaler", "nn.utils.*"]     # public names that it is held to, whether it exposes them or not
    extensions = ["amp.grad_scaler.fused_step.*"] # clauses of the level `extension` that it is held to as well
    distribution = "their-package"                # whose version reports tell

    [names]                                       # torch's paths, and where the package has them
    "amp.GradScaler" = "their.scaler.LossScaler"

    [device]                                      # what is judged on, where `--device` does not say
    type = "npu"
    import = "torch_npu"                          # the module that brings it

    [[expectations]]                              # what is known to be red
    clause = "amp.grad_scaler.update.growth"      # or: test = "conformance/amp/test_grad_scaler.py::test_x[cpu]";
                                                  # or a list of either
    reason = "The scale grows past float32."
    link = "https://…"
    expires = 2027-06-30

`*` stands for any part of a name or clause. The file lies beside the package's `__init__`, or anywhere for
`--claims FILE`. What is wrong with it is told in sentences, `problems`; the rest of it counts all the same.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import importlib.util
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.judge.errors import describe

NAME = "conformance_claims.toml"
# By which every process that a run starts, ranks among them, learns of a file that does not lie beside its package.
_GIVEN = "TANDEM_CLAIMS"


class UnreadableClaims(Exception):
    """A claims file of which nothing can be read."""


@dataclass(frozen=True)
class Device:
    type: str
    brought_by: str = ""  # a module


@dataclass(frozen=True)
class Expectation:
    """Something of which it is known that it is red: all tests of a clause, or one test (of any parameters)."""

    clause: str
    test: str
    reason: str
    expires: datetime.date
    link: str = ""

    @property
    def about(self) -> str:
        return self.clause or self.test

    def covers(self, nodeid: str, clause: str) -> bool:
        if self.clause:
            return clause == self.clause
        return self.test in (nodeid, nodeid.partition("[")[0])


@dataclass(frozen=True)
class ClaimsFile:
    path: str = ""
    claims: tuple[str, ...] | None = None
    extensions: tuple[str, ...] = ()
    distribution: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    device: Device | None = None
    expectations: tuple[Expectation, ...] = ()
    problems: tuple[str, ...] = ()


def give(package: str, file: Path) -> None:
    """Let `file` be the claims file of `package`, here and in every process that is started from here."""
    os.environ[_GIVEN] = f"{package}={file.absolute()}"


@functools.cache
def claims_file(package: str) -> ClaimsFile:
    """A package's claims file; an empty one if it has none.

    Raises:
        UnreadableClaims: it cannot be read, or is no TOML.
    """
    given, _, path = os.environ.get(_GIVEN, "").partition("=")
    file = Path(path) if given == package else _beside(package)
    return ClaimsFile() if file is None else read(file)


def _beside(package: str) -> Path | None:
    """Found without importing the package, which may need a device that its file names."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # its parent cannot be imported, or it was made by hand
        return None
    folders = (spec and spec.submodule_search_locations) or ()
    return next((file for folder in folders if (file := Path(folder) / NAME).is_file()), None)


def read(file: Path) -> ClaimsFile:
    """What a claims file says, and what is wrong with how it says it."""
    try:
        table = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:  # what is no TOML, or no text, is a ValueError
        raise UnreadableClaims(
            f"the claims file {file} cannot be read ({describe(error)}); expected TOML as in "
            "docs/judging.md, 'The claims file'"
        ) from error
    problems: list[str] = []
    top = _Table(table, str(file), problems)
    top.knows("claims", "extensions", "distribution", "names", "device", "expectations")
    claims = top.get("claims", _TEXTS)
    found = {
        "path": str(file),
        "claims": None if claims is None else tuple(claims),
        "extensions": tuple(top.get("extensions", _TEXTS) or ()),
        "distribution": top.get("distribution", _TEXT) or "",
        "names": dict(_leaves(top.get("names", _NAMES) or {})),
        "device": _device(top),
        "expectations": tuple(_expectations(top)),
    }
    return ClaimsFile(**found, problems=tuple(problems))


def _device(top: _Table) -> Device | None:
    for table in top.tables("device", _TABLE):
        table.knows("type", "import")
        if kind := table.get("type", _TEXT, is_needed=True):
            return Device(kind, table.get("import", _TEXT) or "")
    return None


def _expectations(top: _Table) -> Iterator[Expectation]:
    for table in top.tables("expectations", _TABLES):
        table.knows("clause", "test", "reason", "link", "expires")
        clauses, tests = _listed(table.get("clause", _ABOUT)), _listed(table.get("test", _ABOUT))
        if bool(clauses) == bool(tests):
            table.complain("both clause and test" if clauses else "neither clause nor test", "one of the two")
        reason = table.get("reason", _TEXT, is_needed=True)
        link, expires = table.get("link", _TEXT) or "", table.get("expires", _DATE, is_needed=True)
        if bool(clauses) != bool(tests) and reason and expires:
            for clause, test in (*((clause, "") for clause in clauses), *(("", test) for test in tests)):
                yield Expectation(clause, test, reason, expires, link)


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


@dataclass(frozen=True)
class _Kind:
    called: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


_TEXT = _Kind("a string", _is_text)
_TEXTS = _Kind(
    'a list of strings, such as ["amp.GradScaler"]',
    lambda value: isinstance(value, list) and all(map(_is_text, value)),
)
_ABOUT = _Kind("a string or a list of strings", lambda value: _is_text(value) or _TEXTS.fits(value))
_NAMES = _Kind(
    'a table of strings, such as "amp.GradScaler" = "their.scaler.LossScaler"',
    lambda value: isinstance(value, dict) and all(_is_text(leaf) for _, leaf in _leaves(value)),
)
_DATE = _Kind("a date without quotes, such as 2027-06-30", lambda value: type(value) is datetime.date)
_TABLE = _Kind("a table, [device]", lambda value: isinstance(value, dict))
_TABLES = _Kind(
    "tables, [[expectations]]",
    lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
)


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values; a name without quotes is read by TOML as a table in a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


class _Table:
    """A table of the file, of which every value is looked at before it is used."""

    def __init__(self, table: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self._table, self._where, self._problems = table, where, problems

    def complain(self, actual: str, expected: str) -> None:
        self._problems.append(f"{self._where} has {actual}; expected {expected}")

    def knows(self, *keys: str) -> None:
        for key in self._table.keys() - set(keys):
            self.complain(f"the unknown key {key!r}", f"one of {', '.join(keys)}{similar(key, keys)}")

    def get(self, key: str, kind: _Kind, *, is_needed: bool = False) -> Any:
        """A value of that kind; None where there is none, and the file's author is told if it is of another."""
        value = self._table.get(key)
        if value is None:
            if is_needed:
                self.complain(f"no {key!r}", kind.called)
            return None
        if not kind.fits(value):
            self.complain(f"{key} = {value!r}", kind.called)
            return None
        return value

    def tables(self, key: str, kind: _Kind) -> Iterator[_Table]:
        found = self.get(key, kind) or []
        for number, table in enumerate([found] if isinstance(found, dict) else found, 1):
            place = f"[{key}]" if isinstance(found, dict) else f"[[{key}]] number {number}"
            yield _Table(table, f"{self._where}: {place}", self._problems)


def similar(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a word that nobody knows; empty where nothing is like it."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
