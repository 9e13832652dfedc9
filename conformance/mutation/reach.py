"""Which lines each test reaches: one run of the groups' tests on source whose lines note that they run.

It takes as long as judging does, so it can be kept in a file: later only tests that are not in it are measured, as long
as the source is the same. Whoever changes what a test does, deletes the file.

Also the plugin of pytest that this run has in each of its processes.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conformance.faults.fork import files_to_collect
from conformance.judge.clauses import HERE, clause_of
from conformance.judge.judgement import RED
from conformance.judge.library import load_library
from conformance.mutation import lines
from conformance.mutation.groups import GROUPS, LINES, MutationGroup, clauses_of, file_of

_FOLDER, _GROUPS, _KNOWN = "CONFORMANCE_LINES_FOLDER", "CONFORMANCE_LINES_GROUPS", "CONFORMANCE_LINES_KNOWN"
_COLLECTED, _IMPORTED = "collected.json", "imported.json"
_GREEN = ("passed", "known", "reference cannot run here")
_USUAL_CODES = (0, 1, 5)  # of pytest: all passed, some failed, none was left to run


@dataclass
class Reach:
    """A test that cannot be measured, since noting disturbs it, is taken to reach everything."""

    source: str  # a digest of what was measured
    clauses: dict[str, str] = field(default_factory=dict)  # by test
    seconds: dict[str, float] = field(default_factory=dict)  # by test that is green on the subject
    reached: dict[str, list[int]] = field(
        default_factory=dict
    )  # by test, the lines as `lines.numbered` counts them
    unmeasured: list[str] = field(default_factory=list)
    imported: list[int] = field(default_factory=list)  # the lines that run when modules are imported

    def tests_of(self, number: int, group: MutationGroup) -> list[str]:
        """A group's tests that may reach a line: each clause's quickest first, then each one's second, and so on.

        What runs at import any test may notice, and those of names and signatures, which have no clause, nothing else:
        each of them asks about a name of its own, so all of these come with the first.
        """
        clauses = _asked_about(group)
        asked = [test for test, clause in self.clauses.items() if clause in clauses]
        is_imported = number in self.imported
        reaching = [
            test
            for test in asked
            if test in self.seconds and (is_imported or number in self.reached.get(test, ()))
        ]
        place: dict[str, int] = {}
        before: Counter[str] = Counter()
        for test in sorted(reaching, key=self.seconds.__getitem__):
            asks = self.clauses[test] or test
            place[test] = before[asks]
            before[asks] += 1
        found = sorted(reaching, key=lambda test: (place[test], self.seconds[test]))
        return found + [test for test in self.unmeasured if test in asked]

    def within(self, tests: Sequence[str], seconds: float) -> list[str]:
        """The first of them that together take no longer, and at least one."""
        ends = itertools.accumulate(self.seconds.get(test, 0.0) for test in tests)
        return [test for test, end in zip(tests, ends, strict=True) if end <= seconds] or [*tests[:1]]


def _asked_about(group: MutationGroup) -> frozenset[str]:
    return clauses_of(group) | {""}


def measure(package: str, groups: Sequence[MutationGroup], jobs: int, kept: Path | None = None) -> Reach:
    """Runs the groups' tests once, and once more those that noting turns red.

    Args:
        kept: what was measured before; it is brought up to date.
    """
    reach = _kept(package, kept)
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        folder = Path(directory)
        environment = {_FOLDER: directory, _GROUPS: json.dumps([group.name for group in groups])}
        known = folder / "known.json"
        known.write_text(json.dumps([*reach.clauses]))
        files = files_to_collect(frozenset[str]().union(*map(clauses_of, groups)))
        noting = _judged(f"{package}+{LINES}", folder, jobs, files, environment | {_KNOWN: str(known)})
        collected = json.loads((folder / _COLLECTED).read_text())
        red = [test["nodeid"] for test in noting if test["outcome"] in RED]
        plain = _judged(package, folder, jobs, red, environment) if red else []
        for file in folder.glob("lines-*.jsonl"):
            reach.reached |= dict(json.loads(line) for line in file.read_text().splitlines())
        reach.imported = json.loads((folder / _IMPORTED).read_text())
    reach.clauses |= collected
    reach.seconds |= {test["nodeid"]: test["seconds"] for test in noting if test["outcome"] in _GREEN}
    reach.unmeasured += [test["nodeid"] for test in plain if test["outcome"] in _GREEN]
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(asdict(reach)))
    reach.clauses = collected  # those that are gone are kept for whoever has them, and not asked
    return reach


def _kept(package: str, file: Path | None) -> Reach:
    """What a file has of this source."""
    source = hashlib.sha256(package.encode())
    for module in lines.numbered(package):
        source.update(file_of(package, module).read_bytes())
    found = Reach(**json.loads(file.read_text())) if file and file.is_file() else None
    return found if found and found.source == source.hexdigest() else Reach(source.hexdigest())


def _judged(
    spec: str, folder: Path, jobs: int, tests: Iterable[str], environment: dict[str, str]
) -> list[dict[str, Any]]:
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
        str(jobs if jobs > 1 else 0),  # a worker would be two more imports of torch
    ]
    command += ["--profile=quick", f"--subject={spec}", f"--report={folder}", "--no-shrink", *tests]
    ended = subprocess.run(
        command, cwd=HERE.parent, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if ended.returncode not in _USUAL_CODES:
        raise RuntimeError(
            f"pytest ended with code {ended.returncode} on {spec}:\n{ended.stdout[-3000:]}{ended.stderr}"
        )
    return json.loads((folder / "report.json").read_text())["tests"]


def pytest_configure(config: pytest.Config) -> None:
    """In each process that runs tests: a file of its own, which its ranks share."""
    package, _, fault_id = config.option.subject.partition("+")
    if fault_id.startswith(LINES):
        file = Path(os.environ[_FOLDER], f"lines-{os.getpid()}")
        file.write_bytes(bytes(max(numbers.stop for numbers in lines.numbered(package).values())))
        os.environ[lines.FILE] = str(file)
        load_library(config.option.subject)
        for module in lines.numbered(package):
            importlib.import_module(f"{package}.{module}")
        file.with_name(_IMPORTED).write_text(json.dumps(lines.taken()))
        config.pluginmanager.register(_Noting(file.with_suffix(".jsonl")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The groups' tests that are not known already; all of them are noted, with their clauses."""
    names = json.loads(os.environ[_GROUPS])
    asked = frozenset[str]().union(*(_asked_about(group) for group in GROUPS if group.name in names))
    items[:] = [item for item in items if clause_of(item) in asked]
    if file := os.environ.get(_KNOWN):
        collected = json.dumps({item.nodeid: clause_of(item) for item in items})
        Path(os.environ[_FOLDER], _COLLECTED).write_text(collected)
        known = frozenset(json.loads(Path(file).read_text()))
        items[:] = [item for item in items if item.nodeid not in known]


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
