"""No number of a device is read on the host before it has arrived there, nor a kernel's before it has run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from conformance.judge.clauses import HERE
from conformance.judge.judgement import unavailable
from conformance.ranks.fixtures import require_simulator
from conformance.strength.mutation.groups import source_files

pytestmark = pytest.mark.deadline(300)

OWNER = "kernels/_copies.py"


@pytest.fixture(scope="module", params=["torch", "triton"])
def reported(request: pytest.FixtureRequest) -> Any:
    """Report of the programs with torch's operators, and with Triton's kernels, interpreted in stream order."""
    require_simulator()
    if request.param == "triton" and find_spec("triton") is None:
        unavailable("Triton is not installed")
    interpreted = str(int(request.param == "triton"))
    environment = os.environ | {"TANDEM_KERNELS": request.param, "TRITON_INTERPRET": interpreted}
    words = [sys.executable, "-m", "impl.optim.tests.host_copy_programs"]
    ended = subprocess.run(
        words, cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_nothing_is_read_before_its_event(reported: Any) -> None:
    assert reported["programs"] >= (45 if reported["interpreted"] else 125)
    assert reported["found"] == {}


def test_each_fault_is_noticed(reported: Any) -> None:
    assert reported["faults"] == (2 if reported["interpreted"] else 5)
    assert reported["unnoticed"] == []


def test_single_file_requests_non_blocking_copies() -> None:
    """Non-blocking copies that no program covers are at least in the one file that the programs test."""
    impl = HERE.parent / "impl"
    asking = [file for file in source_files("impl") if "non_blocking" in file.read_text(encoding="utf-8")]
    assert [file.relative_to(impl).as_posix() for file in asking] == [OWNER]
