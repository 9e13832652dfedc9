"""Processes that a process has started, directly or not, found by a variable of their environment."""

from __future__ import annotations

from pathlib import Path


def marked_processes(mark: str) -> list[int]:
    """Return the ids of all processes whose environment had `mark` (NAME=value) when they started."""
    ids: list[int] = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and mark.encode() in (directory / "environ").read_bytes().split(
                b"\0"
            ):
                ids.append(int(directory.name))
        except OSError:  # a process that has ended, or of another user
            continue
    return ids
