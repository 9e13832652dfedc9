"""A point of the clock in one file, `point.json`: `ci/gate` and `ci/gpu` leave it, `ci/bench --add` keeps it.

It holds what asv is to show, what ran (git's ids of the files, for a machine without git), and whose it is. Needs
nothing but Python, and git where it is added.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import asv_format, history, machine, source

FILE = "point.json"


class Unfit(ValueError):
    """Why the point cannot be kept, in words for its user."""


def whole(results: Mapping[str, Any], described: Mapping[str, str], ran: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the file.

    Args:
        results: asv's, without a commit.
        described: the machine, as `describe_machine` does it.
        ran: what `source.here` says.
    """
    return {
        "results": results,
        "machine": {**described, "version": asv_format.VERSION_OF_MACHINE},
        "host": _this_host(),
        "source": ran,
    }


def add(point: Path, name: str | None = None, root: Path = source.ROOT) -> list[Path]:
    """Put a point, or the one of a folder, where asv finds it; the files that hold it. To do it again changes nothing.

    Args:
        name: the machine's, if it is not to be the one that it was measured under.

    Raises:
        Unfit: it is no point, is of code that is no commit of this repository, or of a machine without a name.
    """
    content = _read(point / FILE if point.is_dir() else point)
    try:
        commit = source.commit_of(content["source"]["files"], content["source"]["commit"], root)
    except source.UnknownSource as error:
        raise Unfit(f"{point} cannot be kept: {error}") from None
    own = {"machine": name or content["machine"]["machine"] or _name_here(content, point)}
    if not re.fullmatch(machine.NAME, own["machine"]):
        raise Unfit(f"{point} names its machine {own['machine']!r}; expected {machine.NAME_RULE}")
    results = content["results"] | {"params": content["results"]["params"] | own}
    folder = root / "benchmarks" / "results"
    return history.add(results, content["machine"] | own, commit, source.author_date_ms(commit, root), folder)


def _name_here(content: Mapping[str, Any], point: Path) -> str:
    if content["host"] != _this_host():
        raise Unfit(f"{point} is of another machine and has no name for it; give one by --machine NAME")
    return machine.make_own_name()


def _this_host() -> str:
    """Enough to tell hosts apart; reports are published, and their names need not be."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise Unfit(
            f"there are no timings at {file} ({error.strerror}); a run of ci/gate or ci/gpu that times impl leaves them"
        ) from None
    except ValueError as error:
        raise Unfit(f"{file} is not whole: {error}") from None
    missing = {"results", "machine", "host", "source"} - set(content)
    if missing:
        raise Unfit(f"{file} is no point: it lacks {', '.join(sorted(missing))}")
    return content
