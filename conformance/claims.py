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
from conformance.library import Library, load_library


@functools.cache
def todo() -> dict[str, str]:
    """Names that `impl` does not have yet, each with the date since which it is owed."""
    return tomllib.loads(Path(__file__).with_name("impl_todo.toml").read_text())


@functools.cache
def claims(spec: str) -> frozenset[str]:
    """The public names that a subject claims; one with a planted fault claims what it would without."""
    library = load_library(spec.partition("+")[0])
    if library.package == "impl":
        return frozenset(surface.names()) - todo().keys()
    listed = _claims_file(library.package)
    if listed is not None:
        return listed
    return frozenset(name for name in surface.names() if library.provides(name))


def is_claimed(library: Library, path: str) -> bool:
    """Whether a name, or the class or module it stands in, is claimed; `path` may point into either."""
    return any(path == name or path.startswith(name + ".") for name in claims(library.spec))


def _claims_file(package: str) -> frozenset[str] | None:
    file = importlib.resources.files(package) / "conformance_claims.toml"
    return frozenset(tomllib.loads(file.read_text())["claims"]) if file.is_file() else None
