"""Which lines each test reaches: one run of a group's tests on source whose lines note that they run.

Also the plugin of pytest that this run has in each of its processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.clauses import HERE, clause_of
from conformance.judgement import RED
from conformance.mutation import lines
from conformance.mutation.groups import GROUPS, LINES, Group, clauses_of
from conformance.strength.fork import test_files

_FOLDER, _GROUP = "CONFORMANCE_LINES_FOLDER", "CONFORMANCE_LINES_GROUP"
_GREEN = ("passed", "known", "reference cannot run here")


@dataclass(frozen=True)
class Reach:
    """Of one group. A test that cannot be measured, since noting disturbs it, is taken to reach everything."""

    seconds: dict[str, float]  # by test that is green on the subject
    reached: dict[str, list[int]]  # by test, the lines as `lines.numbered` counts them
    unmeasured: list[str]

    def tests_of(self, number: int) -> tuple[str, ...]:
        """Those that reach a line, the quickest first."""
        found = [test for test in self.seconds if number in self.reached.get(test, ())]
        return (*sorted(found, key=self.seconds.__getitem__), *self.unmeasured)


def measure(package: str, group: Group, jobs: int) -> Reach:
    """Runs the group's tests once, and once more those that noting turns red."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        folder = Path(directory)
        noting = _judged(f"{package}+{LINES}{group.name}", folder, group, jobs, test_files())
        red = [test["nodeid"] for test in noting if test["outcome"] in RED]
        plain = _judged(package, folder, group, jobs, red) if red else []
        reached = {}
        for file in folder.glob("lines-*.jsonl"):
            reached |= dict(json.loads(line) for line in file.read_text().splitlines())
    green = {test["nodeid"]: test["seconds"] for test in noting if test["outcome"] in _GREEN}
    return Reach(green, reached, [test["nodeid"] for test in plain if test["outcome"] in _GREEN])


def _judged(spec: str, folder: Path, group: Group, jobs: int, tests: Iterable[str]) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        __name__,
        "-n",
        str(jobs),
    ]
    command += ["--profile=quick", f"--subject={spec}", f"--report={folder}", "--no-shrink", *tests]
    environment = os.environ | {_FOLDER: str(folder), _GROUP: group.name}
    ended = subprocess.run(
        command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest ended with code {ended.returncode} on {spec}:\n{ended.stdout[-3000:]}{ended.stderr}"
        )
    return json.loads((folder / "report.json").read_text())["tests"]


def pytest_configure(config: pytest.Config) -> None:
    """In each process that runs tests: a file of its own, which its ranks share."""
    package, _, plant_id = config.option.subject.partition("+")
    if plant_id.startswith(LINES):
        file = Path(os.environ[_FOLDER], f"lines-{os.getpid()}")
        file.write_bytes(bytes(max(numbers.stop for numbers in lines.numbered(package, _group()).values())))
        os.environ[lines.FILE] = str(file)
        config.pluginmanager.register(_Noting(file.with_suffix(".jsonl")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = clauses_of(_group())
    items[:] = [item for item in items if clause_of(item) in wanted]


def _group() -> Group:
    return next(group for group in GROUPS if group.name == os.environ[_GROUP])


class _Noting:
    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        lines.taken()
        try:
            return (yield)
        finally:
            with self._file.open("a") as file:
                file.write(json.dumps([item.nodeid, lines.taken()]) + "\n")
