"""Results in one file, `point.json`, which `ci/gate` and `ci/gpu` write and `ci/bench --add` records.

The file holds asv's results, the source files that ran (as git's ids, for a machine without git), and the machine.
This module needs only Python, and git to record the results.
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
    """Raised when the results in a file cannot be recorded. The text is for the user."""


def content_of(
    results: Mapping[str, Any], description: Mapping[str, str], ran: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of the file.

    Args:
        results: asv's results, without a commit.
        description: the machine, from `describe_machine`.
        ran: the source files, from `source.here`.
    """
    return {
        "results": results,
        "machine": {**description, "version": asv_format.VERSION_OF_MACHINE},
        "host": _this_host(),
        "source": ran,
    }


def add(point: Path, name: str | None = None, root: Path = source.ROOT) -> list[Path]:
    """Record the results of a file, or of a folder with such a file, where asv finds them. Return the written files.

    Adding the same results again changes nothing.

    Args:
        name: the machine's name, if it differs from the name in the file.

    Raises:
        Unfit: the file is invalid, its code is not a commit of this repository, or its machine has no name.
    """
    content = _read(point / FILE if point.is_dir() else point)
    try:
        commit = source.commit_of(content["source"]["files"], content["source"]["commit"], root)
    except source.UnknownSource as error:
        raise Unfit(f"{point} cannot be recorded: {error}") from None
    own = {"machine": name or content["machine"]["machine"] or _name_here(content, point)}
    if not re.fullmatch(machine.NAME, own["machine"]):
        raise Unfit(f"{point} names its machine {own['machine']!r}; expected {machine.NAME_RULE}")
    results = content["results"] | {"params": content["results"]["params"] | own}
    folder = root / "benchmarks" / "results"
    return history.add(results, content["machine"] | own, commit, source.author_date_ms(commit, root), folder)


def _name_here(content: Mapping[str, Any], point: Path) -> str:
    if content["host"] != _this_host():
        raise Unfit(f"{point} was measured on another machine, which has no name; pass --machine NAME")
    return machine.make_own_name()


def _this_host() -> str:
    """Return a hash that identifies the host. Reports are published, so they must not contain its name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise Unfit(
            f"there are no timings at {file} ({error.strerror}); run ci/gate or ci/gpu with timing of impl first"
        ) from None
    except ValueError as error:
        raise Unfit(f"{file} is incomplete: {error}") from None
    missing = {"results", "machine", "host", "source"} - set(content)
    if missing:
        raise Unfit(f"{file} is not a file of results: it lacks {', '.join(sorted(missing))}")
    return content
