"""Helpers for the tests of recorded results."""

from __future__ import annotations

import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import asv_format

CI = Path(__file__).resolve().parents[2] / "ci"
MACHINE = {"machine": "m", "os": "Linux"}


def measured(name: str, ratio: float) -> dict[str, Any]:
    return {"name": name, "outcome": "measured", "ratio": ratio}


def results(ratios: dict[str, float], noise: float = 0.1, share_of_copy: float = 0.5) -> dict[str, Any]:
    """Return the results of a run with one benchmark and two sizes."""
    name = "bench_clip.RatioClip"
    cases = {(repr(size),): ratio for size, ratio in ratios.items()}
    described = {
        f"{name}.{method}": {"params": [["'few'", "'many'"]], "version": "1"}
        for method in (
            "track_ratio_vs_torch",
            "track_noise",
            "track_share_of_copy",
            "track_seconds",
            "track_seconds_of_torch",
        )
    }
    values: asv_format.Measured = {
        f"{name}.track_ratio_vs_torch": {case: {"result": ratio} for case, ratio in cases.items()},
        f"{name}.track_noise": {case: {"result": noise} for case in cases},
        f"{name}.track_share_of_copy": {case: {"result": share_of_copy} for case in cases},
        f"{name}.track_seconds": {case: {"result": 6.0 * ratio} for case, ratio in cases.items()},
        f"{name}.track_seconds_of_torch": {case: {"result": 6.0} for case in cases},
    }
    return asv_format.results(described, values, MACHINE, {"python": "3.11", "torch": "2.13.0"}, 7)


def git(root: Path, *words: Any) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", root, *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def load_command(command: str) -> ModuleType:
    loader = SourceFileLoader(command, str(CI / command))
    module = module_from_spec(spec_from_loader(command, loader))
    loader.exec_module(module)
    return module
