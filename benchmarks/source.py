"""Identity of the code that ran: git's id of each file.

The ids can be computed on a host without git. A repository that has the commit finds it by them.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Files that a result depends on.
_FOLDERS = ("impl", "benchmarks", "conformance")
_FILES = ("ci/gpu", "pyproject.toml")
_MADE = ("__pycache__", "benchmarks/results")
_DEADLINE_S = 60


class UnknownSource(ValueError):
    """Raised if no commit of this repository has the files that ran."""


def here(root: Path = ROOT) -> dict[str, Any]:
    """Return the current commit and the ids of the current files."""
    return {"commit": commit_here(root), "files": files(root)}


def files(root: Path = ROOT) -> dict[str, str]:
    """Return git's id of each file, by path."""
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
    """Return the commit that is checked out, or None without git."""
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", "HEAD").strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def commit_of(ran: dict[str, str], claimed: str | None, root: Path = ROOT) -> str:
    """Return the commit with the files that ran: `claimed` if it has them, else the oldest commit in history with them.

    Files that were copied to a host may be newer than the commit that it knows.

    Raises:
        UnknownSource: `claimed` is not in this repository, or no commit has these files.
    """
    try:
        known = files_of(claimed or "HEAD", root)
    except subprocess.CalledProcessError:
        raise UnknownSource(
            f"they were measured at commit {claimed}, which this repository does not have; fetch it first"
        ) from None
    if claimed is not None and known == ran:
        return claimed
    commits = [commit for commit in _history(root) if files_of(commit, root) == ran]
    if not commits:
        raise UnknownSource(
            "they were measured with files that no commit of this repository has (different from commit "
            f"{(claimed or 'HEAD')[:12]}: {_list_some(differing(known, ran))}); commit them and measure again"
        )
    return commits[-1]


def differing(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    names = expected.keys() | actual.keys()
    return sorted(name for name in names if expected.get(name) != actual.get(name))


def _list_some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _history(root: Path) -> list[str]:
    """Return all commits that changed the files, newest first."""
    return _git(root, "rev-list", "--all", "--topo-order", "--", *_FOLDERS, *_FILES).split()


def author_date_ms(commit: str, root: Path = ROOT) -> int:
    """Return the author date of a commit, by which asv orders commits."""
    return int(_git(root, "show", "-s", "--format=%at", commit)) * 1000


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=_DEADLINE_S
    ).stdout
