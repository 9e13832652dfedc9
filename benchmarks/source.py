"""Which code ran. A host need have no git: the files' ids, which are git's own, tell the commit to whoever has it."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What a result depends on.
_FOLDERS = ("impl", "benchmarks", "conformance")
_FILES = ("ci/gpu", "pyproject.toml")
_MADE = ("__pycache__", "benchmarks/results")
_DEADLINE_S = 60


class UnknownSource(ValueError):
    """No commit of this repository is what ran."""


def here(root: Path = ROOT) -> dict[str, Any]:
    """What would run now."""
    return {"commit": commit_here(root), "files": files(root)}


def files(root: Path = ROOT) -> dict[str, str]:
    """git's id of each file, by its path."""
    paths = [path for folder in _FOLDERS for path in (root / folder).rglob("*")]
    paths += [root / name for name in _FILES]
    names = (path.relative_to(root).as_posix() for path in paths if path.is_file())
    return {name: _blob_id((root / name).read_bytes()) for name in sorted(names) if _counts(name)}


def _counts(name: str) -> bool:
    return not name.endswith((".pyc", ".so")) and not any(part in name for part in _MADE)


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def files_of(commit: str, root: Path = ROOT) -> dict[str, str]:
    listed = _git(root, "ls-tree", "-r", commit, "--", *_FOLDERS, *_FILES).splitlines()
    entries = (line.split("\t", 1) for line in listed)
    return {name: about.split()[2] for about, name in entries if _counts(name)}


def commit_here(root: Path = ROOT) -> str | None:
    """The commit that is checked out; None where nobody can say."""
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", "HEAD").strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def commit_of(ran: dict[str, str], claimed: str | None, root: Path = ROOT) -> str:
    """The commit whose files are those that ran: the one claimed, or else the oldest of the history that has them.

    Raises:
        UnknownSource: the claimed commit is not in this repository, or has other files; or no commit has these.
    """
    if claimed is not None:
        try:
            known = files_of(claimed, root)
        except subprocess.CalledProcessError:
            raise UnknownSource(
                f"they were measured at commit {claimed}, which this repository does not have; fetch it first"
            ) from None
        if known != ran:
            raise UnknownSource(
                f"they were measured in a dirty tree: at commit {claimed[:12]}, but with other contents of "
                f"{_some(differing(known, ran))}; commit them and measure again"
            )
        return claimed
    found = [commit for commit in _history(root) if files_of(commit, root) == ran]
    if not found:
        head = files_of("HEAD", root)
        raise UnknownSource(
            "they were measured with files that no commit of this repository has (compared with the current one, "
            f"others are {_some(differing(head, ran))}); commit them and measure again"
        )
    return found[-1]


def differing(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _history(root: Path) -> list[str]:
    """Newest first."""
    return _git(root, "rev-list", "--all", "--topo-order", "--", *_FOLDERS, *_FILES).split()


def author_date_ms(commit: str, root: Path = ROOT) -> int:
    """The date by which asv orders commits."""
    return int(_git(root, "show", "-s", "--format=%at", commit)) * 1000


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=_DEADLINE_S
    ).stdout
