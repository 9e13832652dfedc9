"""What a subject claims to provide, which decides whether a missing name is red or merely reported.

`impl` claims the whole surface but for the dated rows of `impl_todo.toml`. Another package claims all that it
exposes, unless it carries a file `conformance_claims.toml` beside its `__init__` with `claims = ["amp.GradScaler", …]`.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from pathlib import Path

from conformance import surface
from conformance.library import Library, LookupFailed, load_library


@functools.cache
def todo() -> dict[str, str]:
    """Names that `impl` does not have yet, each with the date since which it is owed."""
    return tomllib.loads(Path(__file__).with_name("impl_todo.toml").read_text())


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


@functools.cache
def _is_claimed_name(package: str, name: str) -> bool:
    if (listed := _listed(package)) is not None:
        return name in listed
    return name in surface.names() and exposes(load_library(package), name)


@functools.cache
def _listed(package: str) -> frozenset[str] | None:
    """What a package claims whatever it exposes; None if it has not said."""
    if package == "impl":
        return frozenset(surface.names()) - todo().keys()
    file = importlib.resources.files(package) / "conformance_claims.toml"
    return frozenset(tomllib.loads(file.read_text())["claims"]) if file.is_file() else None


def exposes(library: Library, name: str) -> bool:
    """Also if its module is there and fails to import: a name that is broken is not a name that is left out."""
    try:
        return library.provides(name)
    except LookupFailed:
        return True
