"""A run of pytest in a process of its own, for measures that need the report of a subject."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conformance.judge.clauses import HERE

_USUAL_CODES = (0, 1, 5)  # exit codes of pytest: passed, failed, no tests


def run_pytest(
    spec: str, folder: Path, jobs: int, words: Iterable[str], variables: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Judge a subject and return the report, which is written to `folder`.

    Args:
        words: options and tests.
        variables: further environment variables.

    Raises:
        RuntimeError: the tests could not be run.
    """
    workers = str(jobs if jobs > 1 else 0)  # no worker for one job, saving two imports of torch
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider"]
    command += [f"--subject={spec}", f"--report={folder}", *words]
    ended = subprocess.run(
        command, cwd=HERE.parent, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    file = folder / "report.json"
    if ended.returncode not in _USUAL_CODES or not file.is_file():
        shown = f"{ended.stdout[-4000:]}{ended.stderr}"
        raise RuntimeError(f"pytest ended with code {ended.returncode} on {spec}:\n{shown}")
    return json.loads(file.read_text())
