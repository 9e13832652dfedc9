"""Where checkpoints lie: written under a name that nobody reads, then renamed, so that each is complete or not there.

Beside a checkpoint `step-10` there may be, after a save that was killed, `.step-10.<id>.writing`, incomplete, and
`.step-10.<id>.replaced`: the one that was to be written over, which counts as long as there is no `step-10`. The next
save of that name removes them. A link stands for what it leads to.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

_METADATA = ".metadata"  # DCP writes it last
_WRITING, _REPLACED = "writing", "replaced"
_HIDDEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.(?P<kind>writing|replaced)")


def begin(path: Path) -> Path:
    """Remove what killed saves have left beside `path`, and make a folder to write to; where it is.

    Raises:
        FileExistsError: `path` is there and is no checkpoint. It is left alone.
    """
    if path.exists() and not _is_complete(path):
        raise FileExistsError(f"{path} is there and is no checkpoint; save to another place, or move it away")
    path = _aim_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover, kind in _beside(path):
        if kind == _WRITING or path.exists():
            _remove(leftover, path)
    folder = _hidden(path, _WRITING)
    folder.mkdir()
    return folder


def commit(folder: Path, path: Path) -> None:
    """Have what was written to `folder` stand at `path`, in the place of what stood there.

    Raises:
        OSError: it could not be; what stood there still does.
    """
    path = _aim_of(path)
    _synchronize(folder)
    replaced = _hidden(path, _REPLACED)
    if path.exists():
        path.rename(replaced)
    try:
        folder.rename(path)
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    _synchronize(path.parent)
    for leftover, _ in _beside(path):
        _remove(leftover, path)


def standing(path: Path) -> Path:
    """Where the complete checkpoint is that counts as `path`.

    Raises:
        FileNotFoundError: there is none.
    """
    if _is_complete(path):
        return path
    for folder, kind in _beside(_aim_of(path)):
        if kind == _REPLACED and _is_complete(folder):
            return folder
    raise FileNotFoundError(f"there is no complete checkpoint at {path}")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, to be given to `load`; None if there is none.

    The newest is the one whose name ends in the highest number, `step-1000`; of those that end in the same or in none
    the one that was completed last.
    """
    found = {_name_of(entry) for entry in Path(folder).iterdir()} if Path(folder).is_dir() else set()
    complete: list[tuple[int, int, Path]] = []
    for name in sorted(found - {""}):
        path = Path(folder) / name
        try:
            completed = (standing(path) / _METADATA).stat().st_mtime_ns
        except FileNotFoundError:
            continue
        number = re.search(r"\d+$", name)
        complete.append((int(number[0]) if number else -1, completed, path))
    return max(complete)[-1] if complete else None


def _name_of(entry: Path) -> str:
    """Of the checkpoint that an entry belongs to; empty if that is incomplete."""
    hidden = _HIDDEN.fullmatch(entry.name)
    if hidden is None:
        return entry.name
    return hidden["name"] if hidden["kind"] == _REPLACED else ""


def _is_complete(folder: Path) -> bool:
    # Path.is_file raises where nobody may look, as in a disk's lost+found.
    return os.path.isfile(folder / _METADATA)


def _aim_of(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _remove(leftover: Path, path: Path) -> None:
    """Take away what an earlier save of this name has left; what cannot be removed counts as incomplete."""
    with contextlib.suppress(OSError):
        unread = leftover.rename(_hidden(path, _WRITING))
        shutil.rmtree(unread, ignore_errors=True)


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{kind}")


def _beside(path: Path) -> Iterator[tuple[Path, str]]:
    """What earlier saves of this name have left, and of what kind that is."""
    if not path.parent.is_dir():
        return
    for entry in sorted(path.parent.iterdir()):
        hidden = _HIDDEN.fullmatch(entry.name)
        if hidden is not None and hidden["name"] == path.name:
            yield entry, hidden["kind"]


def _synchronize(folder: Path) -> None:
    """Have the names in a folder reach the disk; where folders cannot be opened (Windows), the system sees to that."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
