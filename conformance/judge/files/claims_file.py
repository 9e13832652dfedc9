"""`conformance_claims.toml`, the file in which a package describes itself to the judge. Every key is optional.

    claims = ["amp.GradScaler", "nn.utils.*"]     # public names that are judged even if the package lacks them
    extensions = ["amp.grad_scaler.fused_step.*"] # clauses of the level `extension` that are judged as well
    distribution = "their-package"                # the distribution whose version the report shows

    [names]                                       # torch's paths, and where the package has them
    "amp.GradScaler" = "their.scaler.LossScaler"

    [device]                                      # the device to judge on, unless `--device` is given
    type = "npu"
    import = "torch_npu"                          # the module that registers it

    [[expectations]]                              # a failure that is known
    clause = "amp.grad_scaler.update.growth"      # or: test = "conformance/amp/test_grad_scaler.py::test_x[cpu]";
                                                  # or a list of clauses or tests
    reason = "The scale grows past float32."
    link = "https://…"
    expires = 2027-06-30

`*` matches any characters of a name or clause. The file is next to the package's `__init__`, or at the path that
`--claims FILE` names. `ClaimsFile.problems` has a sentence for each wrong entry. The other entries still count.
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
# Environment variable that passes the path of `--claims` to every process that a run starts, ranks included.
_CLAIMS_VARIABLE = "TANDEM_CLAIMS"


class UnreadableClaims(Exception):
    """Raised when a claims file cannot be read at all."""


@dataclass(frozen=True)
class Device:
    type: str
    brought_by: str = ""  # the module that registers it


@dataclass(frozen=True)
class Expectation:
    """A known failure: all tests of a clause, or one test with any parameters."""

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


def set_claims_file(package: str, file: Path) -> None:
    """Use `file` as the claims file of `package`, in this process and in every process started from it."""
    os.environ[_CLAIMS_VARIABLE] = f"{package}={file.absolute()}"


@functools.cache
def claims_file(package: str) -> ClaimsFile:
    """Return a package's claims file, or an empty one if it has none.

    Raises:
        UnreadableClaims: the file cannot be read, or is not TOML.
    """
    named_package, _, path = os.environ.get(_CLAIMS_VARIABLE, "").partition("=")
    file = Path(path) if named_package == package else _find_in_package(package)
    return ClaimsFile() if file is None else read(file)


def _find_in_package(package: str) -> Path | None:
    """Return the claims file in the package's folder. Do not import the package, which may need a device first."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # the parent fails to import, or the module has no spec
        return None
    folders = (spec and spec.submodule_search_locations) or ()
    return next((file for folder in folders if (file := Path(folder) / NAME).is_file()), None)


def read(file: Path) -> ClaimsFile:
    """Read a claims file and collect the problems of its format."""
    try:
        table = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:  # a ValueError if it is not TOML or not text
        raise UnreadableClaims(
            f"the claims file {file} cannot be read ({describe(error)}); expected TOML as in "
            "docs/judging.md, 'The claims file'"
        ) from error
    problems: list[str] = []
    top = _Table(table, str(file), problems)
    top.knows("claims", "extensions", "distribution", "names", "device", "expectations")
    claims = top.get("claims", _TEXTS)
    fields = {
        "path": str(file),
        "claims": None if claims is None else tuple(claims),
        "extensions": tuple(top.get("extensions", _TEXTS) or ()),
        "distribution": top.get("distribution", _TEXT) or "",
        "names": dict(_leaves(top.get("names", _NAMES) or {})),
        "device": _device(top),
        "expectations": tuple(_expectations(top)),
    }
    return ClaimsFile(**fields, problems=tuple(problems))


def _device(top: _Table) -> Device | None:
    for table in top.tables("device", _TABLE):
        table.knows("type", "import")
        if kind := table.get("type", _TEXT, is_needed=True):
            return Device(kind, table.get("import", _TEXT) or "")
    return None


def _expectations(top: _Table) -> Iterator[Expectation]:
    for table in top.tables("expectations", _TABLES):
        table.knows("clause", "test", "reason", "link", "expires")
        clauses, tests = _as_list(table.get("clause", _ABOUT)), _as_list(table.get("test", _ABOUT))
        if bool(clauses) == bool(tests):
            table.complain("both clause and test" if clauses else "neither clause nor test", "one of the two")
        reason = table.get("reason", _TEXT, is_needed=True)
        link, expires = table.get("link", _TEXT) or "", table.get("expires", _DATE, is_needed=True)
        if bool(clauses) != bool(tests) and reason and expires:
            for clause, test in (*((clause, "") for clause in clauses), *(("", test) for test in tests)):
                yield Expectation(clause, test, reason, expires, link)


def _as_list(value: str | list[str] | None) -> list[str]:
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
    """Yield names and values. TOML reads a dotted name without quotes as nested tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


class _Table:
    """A table of the file that checks every value before it returns it."""

    def __init__(self, table: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self._table, self._where, self._problems = table, where, problems

    def complain(self, actual: str, expected: str) -> None:
        self._problems.append(f"{self._where} has {actual}; expected {expected}")

    def knows(self, *keys: str) -> None:
        for key in self._table.keys() - set(keys):
            self.complain(f"the unknown key {key!r}", f"one of {', '.join(keys)}{similar(key, keys)}")

    def get(self, key: str, kind: _Kind, *, is_needed: bool = False) -> Any:
        """Return the value of `key`, or None if it is missing or of the wrong type, which becomes a problem."""
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
        value = self.get(key, kind) or []
        for number, table in enumerate([value] if isinstance(value, dict) else value, 1):
            place = f"[{key}]" if isinstance(value, dict) else f"[[{key}]] number {number}"
            yield _Table(table, f"{self._where}: {place}", self._problems)


def similar(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" for an unknown word, or an empty string if no known word is similar."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
