"""Selection of the tests of a run. It records the outcome and the reason of each clause that has no test left."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from conformance.cli.options import PROFILES
from conformance.judge.accounting import NOT_RUN, OTHER_SHARD, NotRun, clauses_of_file
from conformance.judge.clauses import AREAS, HERE, Clause, all_clauses, clause_of, parameters_of
from conformance.judge.durations import first_tests, function_of, recorded, shard_of, smoke_functions
from conformance.judge.library import package_of
from conformance.judge.sandbox.notes import Notes

_SELFTESTS = HERE / "selftests"
_NOT_IN_SMOKE = "the profile smoke has no test of it; --profile quick has one"


class Selection:
    """A pytest plugin of every process that collects tests."""

    def __init__(self, config: pytest.Config, notes: Notes) -> None:
        self._config, self._notes = config, notes
        # Clauses whose outcome is known before any test, see `conformance.judge.accounting`.
        self._known = {name: NotRun(**fields) for name, fields in notes.read("known").items()}
        self._not_run: dict[str, NotRun] = {}
        self._smoke = smoke_functions(recorded()) if config.option.profile == "smoke" else {}
        self._covered: set[tuple[str, str]] = set()  # clauses and devices with a test in the profile smoke

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Ignore a folder or a file without tests to run. What the command line names is never ignored.

        These are the suite's selftests, which judge no subject, and the files of clauses that are not chosen or whose
        outcome is known. They are not imported.
        """
        if collection_path == _SELFTESTS:
            words = (word.partition("::")[0] for word in self._config.args)
            named = (Path(self._config.invocation_params.dir, word) for word in words)
            return None if any(path.is_relative_to(_SELFTESTS) for path in named) else True
        if collection_path.suffix != ".py" or not (ids := clauses_of_file(collection_path)):
            return None
        chosen = [clause for name in ids if (clause := all_clauses().get(name)) and self._is_chosen(clause)]
        results = [result for clause in chosen if (result := self._decided(clause))]
        if not self._may_have_smoke(collection_path):
            results = [
                self._decided(clause) or NotRun(clause.id, NOT_RUN, _NOT_IN_SMOKE) for clause in chosen
            ]
        if not ids <= all_clauses().keys() or len(results) < len(chosen):
            return None
        self._not_run |= {result.clause: result for result in results}
        return True

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        selected: list[pytest.Item] = []
        deselected: list[pytest.Item] = []
        for item in items:
            (selected if self._is_selected(item) else deselected).append(item)
        for select in (self._thin_out, self._split):
            selected, others = select(selected)
            deselected += others
        self._config.hook.pytest_deselected(items=deselected)
        first = set(first_tests(item.nodeid for item in selected))
        items[:] = sorted(selected, key=lambda item: item.nodeid not in first)
        for clause_id in map(clause_of, selected):
            self._not_run.pop(clause_id, None)
        self._notes.keep("not-run", [asdict(result) for result in self._not_run.values()])

    def _thin_out(self, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Split the items into those of the profile and the others.

        In the profile `quick`, each pair of values of a function's parameters occurs for each of its clauses, but not
        each combination. The repository's own tests, which have no clause, run in all combinations. So do tests that
        the command line names with their parameters.
        """
        if self._config.option.profile != "quick":
            return items, []
        folder = self._config.invocation_params.dir
        named = {str(Path(folder, word)) for word in self._config.args if "[" in word}
        by_question: dict[tuple[str, str], list[pytest.Item]] = {}
        for item in filter(clause_of, items):
            if str(self._config.rootpath / item.nodeid) not in named:
                by_question.setdefault((clause_of(item), function_of(item.nodeid)), []).append(item)
        others: set[pytest.Item] = set()
        for tests in by_question.values():
            # pytest's order depends on which other files are collected.
            tests.sort(key=lambda item: item.nodeid)
            chosen = cover_pairs([parameters_of(test) for test in tests])
            others.update(test for number, test in enumerate(tests) if number not in chosen)
        return [item for item in items if item not in others], [*others]

    def _split(self, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Split the items into those of `--shard` and the others."""
        if not self._config.option.shard:
            return items, []
        number, count = map(int, self._config.option.shard.split("/"))
        nodeids = sorted(item.nodeid for item in items)
        self._notes.keep("selection", hashlib.sha256("\n".join(nodeids).encode()).hexdigest())
        shards = shard_of(nodeids, count, recorded())
        chosen = [item for item in items if shards[function_of(item.nodeid)] == number]
        others = [item for item in items if shards[function_of(item.nodeid)] != number]
        for clause_id in filter(None, map(clause_of, others)):
            self._not_run[clause_id] = NotRun(clause_id, NOT_RUN, OTHER_SHARD)
        return chosen, others

    def _is_selected(self, item: pytest.Item) -> bool:
        clause = all_clauses().get(clause_of(item))
        if not applies_to(item, package_of(self._config.option.subject)):
            return False
        if self._config.option.clauses and (clause is None or not self._is_chosen(clause)):
            return False
        result = self._decided(clause) if clause else None
        if not result and (why := self._outside_of_profile(item)):
            result = NotRun(clause_of(item), NOT_RUN, why)
        if result and clause:
            self._not_run[clause.id] = result
        return not result

    def _may_have_smoke(self, file: Path) -> bool:
        """Return whether the profile may run a test of a file. All profiles but `smoke` may."""
        place = file.relative_to(HERE.parent).as_posix()
        return self._config.option.profile != "smoke" or any(
            function.startswith(f"{place}::") for function in self._smoke.values()
        )

    def _decided(self, clause: Clause) -> NotRun | None:
        """Return the outcome of a clause if no test of it has to run."""
        if clause.mark not in self._config.option.marks.split(","):
            return NotRun(clause.id, NOT_RUN, f"its mark {clause.mark} is not in --marks")
        if clause.id in self._known:
            return self._known[clause.id]
        if self._config.option.profile == "smoke" and clause.id not in self._smoke:
            return NotRun(clause.id, NOT_RUN, _NOT_IN_SMOKE)
        return None

    def _is_chosen(self, clause: Clause) -> bool:
        chosen = self._config.option.clauses
        return not chosen or clause.is_asked_by(chosen.split(","))

    def _outside_of_profile(self, item: pytest.Item) -> str:
        smallest, profile = item.get_closest_marker("profile"), self._config.option.profile
        if profile == "smoke":
            key = (clause_of(item), str(parameters_of(item).get("device", "")))
            if self._smoke.get(key[0]) == function_of(item.nodeid) and key not in self._covered:
                self._covered.add(key)
                return ""
            return _NOT_IN_SMOKE
        if smallest is None or PROFILES.index(smallest.args[0]) <= PROFILES.index(profile):
            return ""
        return f"the profile {profile} has no test of it; --profile {smallest.args[0]} has one"


def folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""


def cover_pairs(cases: Sequence[Mapping[str, object]]) -> set[int]:
    """Return the numbers of a few cases that have each pair of values of two parameters that occurs in any case.

    Values are compared by identity.
    """
    values = [[(name, id(value)) for name, value in case.items()] for case in cases]
    pairs = [set(itertools.combinations(named, min(2, len(named)))) for named in values]
    missing, chosen = set().union(*pairs), set[int]()
    while missing:
        number = max(range(len(cases)), key=lambda number: len(pairs[number] & missing))
        chosen.add(number)
        missing -= pairs[number]
    return chosen


def applies_to(item: pytest.Item, package: str) -> bool:
    """Return whether a test applies to the subject. Tests of this repository only run with `impl`.

    Tests that train with a subject, also through other libraries, run with torch as well, to compare.
    """
    if not item.path.is_relative_to(HERE.parent):  # a test of another project
        return True
    folder = folder_of(item)
    trains = folder in ("clients", "training") and package == "torch"
    return package == "impl" or trains or folder in (*AREAS, "test_surface.py")
