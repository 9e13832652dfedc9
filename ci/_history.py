"""Commits to time, and a separate worktree for each."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _environment import ROOT, git


def commits_of_impl(count: int, root: Path = ROOT) -> list[str]:
    """Return the last commits of the current branch that change impl, newest first."""
    return git(root, "rev-list", "--first-parent", f"--max-count={count}", "HEAD", "--", "impl").split()


def commit_named(name: str, root: Path = ROOT) -> str:
    """Return the full id of a commit.

    Raises:
        ValueError: this repository has no such commit.
    """
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        raise ValueError(f"{name!r} is not a commit of this repository") from None


def subject_of(commit: str, root: Path = ROOT) -> str:
    return git(root, "show", "-s", "--format=%h %s", commit).strip()


def date_ms(commit: str, root: Path = ROOT) -> int:
    """Return the author date of a commit, by which asv orders commits."""
    return int(git(root, "show", "-s", "--format=%at", commit)) * 1000


def unmeasured(commits: list[str], folder: Path) -> list[str]:
    """Return the commits without results in the machine's folder."""
    return [commit for commit in commits if not any(folder.glob(f"{commit[:8]}-*.json"))]


@contextmanager
def worktree(commit: str, parent: Path, root: Path = ROOT) -> Iterator[Path]:
    """Context manager with a folder of impl at `commit` and the current benchmarks. The folder is removed at exit."""
    path = parent / commit[:12]
    _remove(path, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        git(root, "worktree", "add", "--quiet", "--detach", "--no-checkout", str(path), commit)
        git(path, "checkout", "--quiet", commit, "--", "impl")
        (path / "benchmarks").symlink_to(root / "benchmarks", target_is_directory=True)
        yield path
    finally:
        _remove(path, root)


def require_impl_of(folder: Path, python: Path, environ: dict[str, str]) -> None:
    """Raise RuntimeError unless a program in `folder` imports impl from that folder."""
    command = [str(python), "-c", "import impl; print(impl.__path__[0])"]
    run = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    where = run.stdout.strip()
    if run.returncode or not Path(where).resolve().is_relative_to(folder.resolve()):
        actual = where or run.stderr.strip().splitlines()[-1]
        raise RuntimeError(f"expected impl of {folder.name} to be imported from {folder}, got: {actual}")


def build_library(tree: Path, commit: str, python: Path) -> None:
    """Build the CPU library of a commit, as an installation does. Do nothing for commits without such a library.

    Raises:
        RuntimeError: the build failed. A missing compiler is not an error.
    """
    if not (tree / "impl" / "kernels" / "_native").is_dir():
        return
    git(tree, "checkout", "--quiet", commit, "--", "pyproject.toml", "README.md", "LICENSE")
    build = "import setuptools; setuptools.setup(script_args=['--quiet', 'build_ext', '--inplace'])"
    run = subprocess.run([str(python), "-c", build], cwd=tree, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(
            f"the CPU library of {commit[:8]} cannot be built: {run.stderr.strip().splitlines()[-1]}"
        )


def _remove(path: Path, root: Path) -> None:
    """Remove a worktree, also one of an earlier run that was killed."""
    if path.exists():
        shutil.rmtree(path)
    git(root, "worktree", "prune")
