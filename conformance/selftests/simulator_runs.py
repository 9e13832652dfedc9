"""Runs of scripts on the simulated accelerator."""

from __future__ import annotations

import textwrap
from pathlib import Path

from conformance.selftests.processes import run_python


def simulate(*words: object, cwd: Path) -> tuple[int, str]:
    """Run `python -m conformance.simulator`. Return the exit status, and the output followed by the errors."""
    ended = run_python("-m", "conformance.simulator", *words, cwd=cwd)
    return ended.returncode, ended.stdout + ended.stderr


def simulate_source(source: str, *words: object, cwd: Path) -> tuple[int, str]:
    """Write `script.py` and simulate it."""
    (cwd / "script.py").write_text(textwrap.dedent(source))
    return simulate("script.py", *words, cwd=cwd)
