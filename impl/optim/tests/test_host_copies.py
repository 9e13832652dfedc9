"""No number of a device is read on the host before it has arrived there; see `late_device` for how that is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from conformance.judge.clauses import HERE
from conformance.mutation.groups import source_files

pytestmark = pytest.mark.deadline(300)

OWNER = "kernels/_copies.py"


@pytest.fixture(scope="module")
def reported() -> Any:
    words = [sys.executable, "-m", "impl.optim.tests.late_programs"]
    ended = subprocess.run(words, cwd=HERE.parent, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_nothing_is_read_before_its_event(reported: Any) -> None:
    assert reported["programs"] > 100
    assert reported["found"] == {}


def test_each_fault_is_noticed(reported: Any) -> None:
    assert reported["faults"] >= 5
    assert reported["unnoticed"] == []


def test_one_file_asks_for_copies_that_do_not_block() -> None:
    """What no program comes by is at least in the hands of the owner, which they hold."""
    impl = HERE.parent / "impl"
    asking = [file for file in source_files("impl") if "non_blocking" in file.read_text(encoding="utf-8")]
    assert [file.relative_to(impl).as_posix() for file in asking] == [OWNER]
