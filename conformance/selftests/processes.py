"""Python programs that tests run in processes of their own, and the processes that those leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from conformance.judge.sandbox.marked_processes import marked_processes

ROOT = Path(__file__).parents[2]
# The simulator is built first if it is not in the cache.
LIMIT_S = 500.0


def run_python(*words: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words and return its outcome. It finds the repository unless PYTHONPATH is passed."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def run_pytest(
    *words: object, cwd: Path = ROOT, packages: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest with one process, which also finds the packages in a folder."""
    path = os.pathsep.join(map(str, (packages or ROOT, ROOT)))
    options = ("-q", "-n", "0", "-p", "no:cacheprovider")
    return run_python("-m", "pytest", *options, *words, cwd=cwd, PYTHONPATH=path)


def left_processes(mark: str) -> list[int]:
    """Return the processes with a mark (NAME=value) in their environment that do not end within 20 seconds."""
    end = time.monotonic() + 20
    while (left := marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return left
