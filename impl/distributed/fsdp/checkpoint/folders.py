"""Folders of checkpoints: written under a temporary name, then renamed, so that each is complete or absent.

After a save that was killed, there may be two folders beside a checkpoint `step-10`: `.step-10.<id>.writing`, which is
incomplete, and `.step-10.<id>.replaced`, the previous checkpoint, which counts as long as there is no `step-10`. The
next save of that name removes them. Links are followed.
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
    """Remove folders that killed saves of `path` have left. Create and return a folder to write to.

    Raises:
        FileExistsError: `path` exists and is not a checkpoint. It is not changed.
    """
    if path.exists() and not _is_complete(path):
        raise FileExistsError(f"{path} exists and is no checkpoint; save to another path, or move it away")
    path = _target_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover, kind in _leftovers(path):
        if kind == _WRITING or path.exists():
            _remove(leftover, path)
    folder = _hidden(path, _WRITING)
    folder.mkdir()
    return folder


def commit(folder: Path, path: Path) -> None:
    """Move the written `folder` to `path`. Replace a previous checkpoint.

    Raises:
        OSError: the move failed. The previous checkpoint is unchanged.
    """
    path = _target_of(path)
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
    for leftover, _ in _leftovers(path):
        _remove(leftover, path)


def resolve_checkpoint(path: Path) -> Path:
    """Return `path` if it is a complete checkpoint, else a previous checkpoint of `path` that a killed save has left.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
    """
    if _is_complete(path):
        return path
    for folder, kind in _leftovers(_target_of(path)):
        if kind == _REPLACED and _is_complete(folder):
            return folder
    raise FileNotFoundError(f"there is no complete checkpoint at {path}")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder, for `load`, or None.

    The newest is the one whose name ends in the highest number, such as `step-1000`. If the numbers are equal or
    absent, it is the one that was completed last.
    """
    names = {_name_of(entry) for entry in Path(folder).iterdir()} if Path(folder).is_dir() else set()
    complete: list[tuple[int, int, Path]] = []
    for name in sorted(names - {""}):
        path = Path(folder) / name
        try:
            completed = (resolve_checkpoint(path) / _METADATA).stat().st_mtime_ns
        except FileNotFoundError:
            continue
        number = re.search(r"\d+$", name)
        complete.append((int(number[0]) if number else -1, completed, path))
    return max(complete)[-1] if complete else None


def _name_of(entry: Path) -> str:
    """Return the name of the checkpoint that an entry belongs to, or "" if it is incomplete."""
    hidden = _HIDDEN.fullmatch(entry.name)
    if hidden is None:
        return entry.name
    return hidden["name"] if hidden["kind"] == _REPLACED else ""


def _is_complete(folder: Path) -> bool:
    # `Path.is_file` raises if the user may not read a folder, such as a disk's lost+found.
    return os.path.isfile(folder / _METADATA)


def _target_of(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _remove(leftover: Path, path: Path) -> None:
    """Remove a folder that an earlier save of `path` has left. If that fails, the folder counts as incomplete."""
    with contextlib.suppress(OSError):
        unread = leftover.rename(_hidden(path, _WRITING))
        shutil.rmtree(unread, ignore_errors=True)


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{kind}")


def _leftovers(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders that earlier saves of this name have left, with their kinds."""
    if not path.parent.is_dir():
        return
    for entry in sorted(path.parent.iterdir()):
        hidden = _HIDDEN.fullmatch(entry.name)
        if hidden is not None and hidden["name"] == path.name:
            yield entry, hidden["kind"]


def _synchronize(folder: Path) -> None:
    """Write the names in a folder to the disk. On Windows, where folders cannot be opened, the system does so."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
