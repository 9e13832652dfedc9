"""Measurement of the lines that each test reaches, by a run of the groups' tests on instrumented source.

It takes as long as judging, so the result can be stored in a file. A later run with the same source measures only tests
that are not in the file. Delete the file after a change of tests.

This module is also the pytest plugin of that run.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conformance.judge.clauses import clause_of
from conformance.judge.judgement import RED
from conformance.judge.library import load_library
from conformance.strength.fork import files_to_collect
from conformance.strength.mutation import lines
from conformance.strength.mutation.groups import GROUPS, LINES, MutationGroup, clauses_of, file_of
from conformance.strength.pytest_run import run_pytest

_FOLDER, _GROUPS, _KNOWN = "CONFORMANCE_LINES_FOLDER", "CONFORMANCE_LINES_GROUPS", "CONFORMANCE_LINES_KNOWN"
_COLLECTED, _IMPORTED = "collected.json", "imported.json"
_GREEN = ("passed", "known", "reference cannot run here")


@dataclass
class Reach:
    """The lines that tests reach.

    A test that fails with instrumented source cannot be measured, and counts as reaching every line.
    """

    source: str  # digest of the measured source
    clauses: dict[str, str] = field(default_factory=dict)  # clause of each test
    seconds: dict[str, float] = field(default_factory=dict)  # duration of each green test
    reached: dict[str, list[int]] = field(
        default_factory=dict
    )  # lines of each test, as `lines.numbered` counts
    unmeasured: list[str] = field(default_factory=list)
    imported: list[int] = field(default_factory=list)  # lines that run at import

    def tests_of(self, number: int, group: MutationGroup) -> list[str]:
        """Return a group's tests that may reach a line: the fastest of each clause, then the second of each, and so on.

        Every test may depend on a line that runs at import. Tests of names and signatures have no clause. They come
        with the first tests, because each is about another name.
        """
        clauses = _clauses_with_none(group)
        candidates = [test for test, clause in self.clauses.items() if clause in clauses]
        is_imported = number in self.imported
        reaching = [
            test
            for test in candidates
            if test in self.seconds and (is_imported or number in self.reached.get(test, ()))
        ]
        place: dict[str, int] = {}
        before: Counter[str] = Counter()
        for test in sorted(reaching, key=self.seconds.__getitem__):
            subject = self.clauses[test] or test
            place[test] = before[subject]
            before[subject] += 1
        ordered = sorted(reaching, key=lambda test: (place[test], self.seconds[test]))
        return ordered + [test for test in self.unmeasured if test in candidates]

    def within(self, tests: Sequence[str], seconds: float) -> list[str]:
        """Return the first tests whose total duration is at most `seconds`, but at least one."""
        ends = itertools.accumulate(self.seconds.get(test, 0.0) for test in tests)
        return [test for test, end in zip(tests, ends, strict=True) if end <= seconds] or [*tests[:1]]


def _clauses_with_none(group: MutationGroup) -> frozenset[str]:
    """Return the clauses of a group, and the empty clause of tests that have none."""
    return clauses_of(group) | {""}


def measure_reach(
    package: str, groups: Sequence[MutationGroup], jobs: int, file: Path | None = None
) -> Reach:
    """Run the groups' tests on instrumented source, and those that fail again on the original source.

    Args:
        file: earlier measurements, which are updated.
    """
    reach = _read(package, file)
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        folder = Path(directory)
        environment = {_FOLDER: directory, _GROUPS: json.dumps([group.name for group in groups])}
        known = folder / "known.json"
        known.write_text(json.dumps([*reach.clauses]))
        files = files_to_collect(frozenset[str]().union(*map(clauses_of, groups)))
        instrumented = _judge(f"{package}+{LINES}", folder, jobs, files, environment | {_KNOWN: str(known)})
        collected = json.loads((folder / _COLLECTED).read_text())
        red = [test["nodeid"] for test in instrumented if test["outcome"] in RED]
        plain = _judge(package, folder, jobs, red, environment) if red else []
        for log in folder.glob("lines-*.jsonl"):
            reach.reached |= dict(json.loads(line) for line in log.read_text().splitlines())
        reach.imported = json.loads((folder / _IMPORTED).read_text())
    reach.clauses |= collected
    reach.seconds |= {test["nodeid"]: test["seconds"] for test in instrumented if test["outcome"] in _GREEN}
    reach.unmeasured += [test["nodeid"] for test in plain if test["outcome"] in _GREEN]
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(reach)))
    # Tests that this run did not collect stay in the file, but cannot run.
    reach.clauses = collected
    return reach


def _read(package: str, file: Path | None) -> Reach:
    """Return the measurements in a file if they are of the current source, else an empty object."""
    source = hashlib.sha256(package.encode())
    for module in lines.numbered(package):
        source.update(file_of(package, module).read_bytes())
    reach = Reach(**json.loads(file.read_text())) if file and file.is_file() else None
    return reach if reach and reach.source == source.hexdigest() else Reach(source.hexdigest())


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
        file.with_name(_IMPORTED).write_text(json.dumps(lines.take_executed()))
        config.pluginmanager.register(_LineRecorder(file.with_suffix(".jsonl")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Select the groups' tests that were not measured before, and write the clauses of all of the groups' tests."""
    names = json.loads(os.environ[_GROUPS])
    clauses = frozenset[str]().union(*(_clauses_with_none(group) for group in GROUPS if group.name in names))
    items[:] = [item for item in items if clause_of(item) in clauses]
    if file := os.environ.get(_KNOWN):
        collected = json.dumps({item.nodeid: clause_of(item) for item in items})
        Path(os.environ[_FOLDER], _COLLECTED).write_text(collected)
        known = frozenset(json.loads(Path(file).read_text()))
        items[:] = [item for item in items if item.nodeid not in known]


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
