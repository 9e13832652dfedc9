"""Measurement of the lines that each test reaches, by a run of the groups' tests on instrumented source.

This module is also the pytest plugin of that run.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.judge.clauses import clause_of
from conformance.judge.judgement import RED
from conformance.judge.library import load_library
from conformance.strength.fork import files_to_collect
from conformance.strength.mutation import lines
from conformance.strength.mutation.groups import GROUPS, LINES, MutationGroup, clauses_of
from conformance.strength.pytest_run import run_pytest

_FOLDER, _GROUPS = "CONFORMANCE_LINES_FOLDER", "CONFORMANCE_LINES_GROUPS"
_GREEN = ("passed", "known", "reference cannot run here")


@dataclass(frozen=True)
class Reach:
    """The lines that tests reach, without those that only run at import.

    A test that fails with instrumented source cannot be measured, and counts as reaching every line.
    """

    clauses: dict[str, str]  # clause of each test
    seconds: dict[str, float]  # duration of each green test
    reached: dict[str, list[int]]  # lines of each test, as `lines.numbered` counts
    unmeasured: list[str]

    def tests_of(self, number: int, group: MutationGroup) -> list[str]:
        """Return a group's tests that may reach a line, the fastest first, and then those that were not measured."""
        clauses = _clauses_with_none(group)
        candidates = [test for test, clause in self.clauses.items() if clause in clauses]
        reaching = [
            test for test in candidates if test in self.seconds and number in self.reached.get(test, ())
        ]
        reaching.sort(key=self.seconds.__getitem__)
        return reaching + [test for test in self.unmeasured if test in candidates]


def _clauses_with_none(group: MutationGroup) -> frozenset[str]:
    """Return the clauses of a group, and the empty clause of tests that have none."""
    return clauses_of(group) | {""}


def measure_reach(package: str, groups: Sequence[MutationGroup], jobs: int) -> Reach:
    """Run the groups' tests on instrumented source, and those that fail again on the original source."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        folder = Path(directory)
        environment = {_FOLDER: directory, _GROUPS: json.dumps([group.name for group in groups])}
        files = files_to_collect(frozenset[str]().union(*map(clauses_of, groups)))
        instrumented = _judge(f"{package}+{LINES}", folder, jobs, files, environment)
        red = [test["nodeid"] for test in instrumented if test["outcome"] in RED]
        plain = _judge(package, folder, jobs, red, environment) if red else []
        logs = [log.read_text().splitlines() for log in folder.glob("lines-*.jsonl")]
    return Reach(
        {test["nodeid"]: test["clause"] for test in instrumented},
        {test["nodeid"]: test["seconds"] for test in instrumented if test["outcome"] in _GREEN},
        dict(json.loads(line) for log in logs for line in log),
        [test["nodeid"] for test in plain if test["outcome"] in _GREEN],
    )


def _judge(
    spec: str, folder: Path, jobs: int, tests: Iterable[str], variables: dict[str, str]
) -> list[dict[str, Any]]:
    words = ["-p", __name__, "--profile=quick", "--no-shrink", *tests]
    return run_pytest(spec, folder, jobs, words, variables)["tests"]


def pytest_configure(config: pytest.Config) -> None:
    """Create the file of executed lines, in each process that runs tests. Its ranks share the file."""
    package, _, fault_id = config.option.subject.partition("+")
    if fault_id.startswith(LINES):
        file = Path(os.environ[_FOLDER], f"lines-{os.getpid()}")
        file.write_bytes(bytes(max(numbers.stop for numbers in lines.numbered(package).values())))
        os.environ[lines.FILE] = str(file)
        load_library(config.option.subject)
        for module in lines.numbered(package):
            importlib.import_module(f"{package}.{module}")
        config.pluginmanager.register(_LineRecorder(file.with_suffix(".jsonl")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Select the groups' tests."""
    names = json.loads(os.environ[_GROUPS])
    clauses = frozenset[str]().union(*(_clauses_with_none(group) for group in GROUPS if group.name in names))
    items[:] = [item for item in items if clause_of(item) in clauses]


class _LineRecorder:
    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        lines.take_executed()
        try:
            return (yield)
        finally:
            with self._file.open("a") as file:
                file.write(json.dumps([item.nodeid, lines.take_executed()]) + "\n")
