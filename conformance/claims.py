"""What a subject claims to provide, which decides whether a missing name is red or merely reported.

A package claims all that it exposes and no extension, unless it carries a file `conformance_claims.toml` beside its
`__init__`, of which each key may be left out:

    claims = ["amp.GradScaler", "nn.utils.*"]                 # public names, whether it exposes them or not
    extensions = ["amp.grad_scaler.fused_step.*"]             # clauses of the level `extension`

`*` stands for any part of a name or clause.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.resources
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from conformance import surface
from conformance.clauses import all_clauses
from conformance.library import Library, LookupFailed, load_library


class NotClaimed(pytest.skip.Exception):
    """The test asks for an extension that the subject does not claim."""


def claims(spec: str) -> frozenset[str]:
    """The public names that a subject claims; one with a planted fault claims what it would without."""
    package = spec.partition("+")[0]
    if (listed := _listed(package)) is not None:
        return listed
    return frozenset(name for name in surface.names() if _is_claimed_name(package, name))


def is_claimed(library: Library, path: str) -> bool:
    """Whether a name, or the class or module it stands in, is claimed; `path` may point into either.

    Only these are looked at: another one might be in a module whose import does not end.
    """
    parts = path.split(".")
    return any(_is_claimed_name(library.package, ".".join(parts[:n])) for n in range(1, len(parts) + 1))


def claimed_extensions(spec: str) -> frozenset[str]:
    """The clauses of the level `extension` that a subject claims; exposing a name claims none.

    Raises:
        ValueError: one of its patterns is no extension's.
    """
    return _extensions(spec.partition("+")[0])


@functools.cache
def _extensions(package: str) -> frozenset[str]:
    known = [clause.id for clause in all_clauses().values() if clause.level == "extension"]
    return _matching("extensions", _claims_file(package).get("extensions", ()), known)


@functools.cache
def _is_claimed_name(package: str, name: str) -> bool:
    if (listed := _listed(package)) is not None:
        return name in listed
    return name in surface.names() and exposes(load_library(package), name)


@functools.cache
def _listed(package: str) -> frozenset[str] | None:
    """What a package claims whatever it exposes; None if it has not said."""
    listed = _claims_file(package).get("claims")
    return None if listed is None else _matching("claims", listed, surface.names())


@functools.cache
def _claims_file(package: str) -> Mapping[str, Any]:
    file = importlib.resources.files(package) / "conformance_claims.toml"
    return tomllib.loads(file.read_text()) if file.is_file() else {}


def _matching(key: str, patterns: Iterable[str], known: Iterable[str]) -> frozenset[str]:
    found = {pattern: fnmatch.filter(known, pattern) for pattern in patterns}
    if empty := [pattern for pattern, matched in found.items() if not matched]:
        raise ValueError(f"{key} of conformance_claims.toml has {empty}, which nothing is called; see README")
    return frozenset(name for matched in found.values() for name in matched)


def exposes(library: Library, name: str) -> bool:
    """Also if its module is there and fails to import: a name that is broken is not a name that is left out."""
    try:
        return library.provides(name)
    except LookupFailed:
        return True
