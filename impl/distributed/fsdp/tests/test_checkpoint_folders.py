"""Folders of checkpoints in impl: a save replaces the old one completely, and `latest` skips incomplete ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from impl.distributed.fsdp import checkpoint
from impl.distributed.fsdp.checkpoint import folders


def written(path: Path, text: str) -> Path:
    """Return a complete folder, as `commit` takes it."""
    folder = folders.begin(path)
    (folder / ".metadata").write_text(text)
    return folder


def has(path: Path) -> str:
    return (folders.resolve_checkpoint(path) / ".metadata").read_text()


@pytest.mark.parametrize("is_there", [True, False])
def test_save_follows_link(tmp_path: Path, is_there: bool) -> None:
    """The link stays a link, to a checkpoint or to a missing path, also when the renaming rank is killed."""
    link, aim = tmp_path / "newest", tmp_path / "disk" / "step-1"
    link.symlink_to(aim)
    if is_there:
        folders.commit(written(aim, "old"), aim)
    for text in ("new", "newer"):
        folders.commit(written(link, text), link)
        assert has(link) == has(aim) == text
    assert link.is_symlink()
    assert [entry.name for entry in aim.parent.iterdir()] == ["step-1"]
    aim.rename(aim.with_name(f".step-1.{'0' * 32}.replaced"))
    assert has(link) == "newer"
    assert checkpoint.latest(tmp_path) == link


def test_failed_replacement_restores_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-1"
    folders.commit(written(path, "old"), path)
    folder, rename = written(path, "new"), Path.rename

    def refuses(self: Path, target: Path) -> Path:
        if self == folder:
            raise OSError("injected")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(OSError, match="injected"):
        folders.commit(folder, path)
    assert path.is_dir()
    assert has(path) == "old"


def test_unremovable_folder_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save succeeds. The rest of the old folder is not a checkpoint, and the next save removes it."""
    path, remove = tmp_path / "step-1", shutil.rmtree

    def fails(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("injected")

    folders.commit(written(path, "old"), path)
    monkeypatch.setattr(shutil, "rmtree", fails)
    folders.commit(written(path, "new"), path)
    assert has(path) == "new"
    folders.commit(written(path, "newer"), path)
    path.rename(tmp_path / "moved")
    assert checkpoint.latest(tmp_path) == tmp_path / "moved"
    monkeypatch.setattr(shutil, "rmtree", remove)
    folders.commit(written(path, "again"), path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["moved", "step-1"]


def test_folders_that_may_not_be_read_are_no_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is lost+found, in which only the disk's owner may read."""
    (tmp_path / "lost+found-7").mkdir()
    folders.commit(written(tmp_path / "step-1", "one"), tmp_path / "step-1")
    stat = os.stat

    def forbids(path: Any, **kwargs: Any) -> os.stat_result:
        if "lost+found-7/" in str(path):
            raise PermissionError(path)
        return stat(path, **kwargs)

    monkeypatch.setattr(os, "stat", forbids)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"


def test_latest_goes_by_number(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for name in ("step-10", "step-9", "last", "step-11"):
        (tmp_path / name).mkdir()
        if name != "step-11":  # step-11 is incomplete
            (tmp_path / name / ".metadata").write_bytes(b"")
    hidden = "0" * 32
    (tmp_path / f".step-12.{hidden}.writing").mkdir()
    (tmp_path / f".step-12.{hidden}.writing" / ".metadata").write_bytes(b"")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    (tmp_path / "step-10").rename(tmp_path / f".step-10.{hidden}.replaced")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
