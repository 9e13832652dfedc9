"""`impl.optim.capture(..., graph=True)`: by CUDA's graphs where there are, by torch's own on the simulated device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from conformance.judge.clauses import HERE
from conformance.ranks.fixtures import require_simulator
from conformance.simulator import NAME

pytestmark = pytest.mark.deadline(560)

FOLDER = "impl/optim/tests"


def run(device: str, profile: str, *files: str) -> None:
    """Run the files' tests in their own process, because a process keeps the simulated device."""
    words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--device", device, "--profile", profile]
    words += [f"{FOLDER}/{file}.py" for file in files]
    ended = subprocess.run(words, cwd=HERE.parent, capture_output=True, text=True, timeout=540, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


def test_steps_that_are_replayed(device: str, pytestconfig: pytest.Config) -> None:
    if device == "cpu":
        require_simulator()
    profile = pytestconfig.getoption("profile")
    run(NAME if device == "cpu" else device, profile, "captured_graphs", "captured_graph_lifetimes")


def test_each_fault_is_caught() -> None:
    require_simulator()
    run(NAME, "quick", "captured_graph_faults")
