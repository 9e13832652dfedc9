"""Recorded durations: shards of about equal length, and the tests of the profile smoke."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.cli import options
from conformance.judge import durations
from conformance.judge.clauses import all_clauses, is_test
from conformance.judge.durations import (
    _OVERHEAD_S,
    _UNKNOWN_S,
    Duration,
    first_tests,
    function_of,
    shard_of,
    smoke_functions,
)
from conformance.selftests.processes import run_pytest
from conformance.selftests.sample_reports import a_report, judged
from conformance.selftests.test_accounting import judge

CORE = [clause.id for clause in all_clauses().values() if clause.level == "core"]
EXTENSION = next(clause.id for clause in all_clauses().values() if clause.level == "extension")
pytestmark = pytest.mark.deadline(220.0)

rows = st.lists(
    st.builds(
        Duration,
        st.sampled_from(CORE[:3]),
        st.sampled_from([f"t.py::test_{letter}" for letter in "abcdef"]),
        st.integers(1, 9),
        st.floats(0, 100),
    ),
    unique_by=lambda row: (row.clause, row.function),
)
node_ids = st.lists(
    st.builds("t.py::test_{}[{}]".format, st.sampled_from("abcdefgh"), st.integers(0, 5)), unique=True
)


@given(durations=rows, nodeids=node_ids, count=st.integers(1, 5), data=st.data())
def test_shards_are_disjoint_complete_and_about_equal(
    durations: list[Duration], nodeids: list[str], count: int, data: st.DataObject
) -> None:
    shards = shard_of(nodeids, count, durations)
    assert shards.keys() == {function_of(nodeid) for nodeid in nodeids}
    assert set(shards.values()) <= set(range(1, count + 1))
    assert shard_of(data.draw(st.permutations(nodeids)), count, durations) == shards

    def seconds(function: str) -> float:
        same = [row for row in durations if row.function == function]
        each_s = sum(row.seconds for row in same) / sum(row.tests for row in same) if same else _UNKNOWN_S
        return sum(function_of(nodeid) == function for nodeid in nodeids) * (each_s + _OVERHEAD_S)

    loads = [
        sum(seconds(name) for name, shard in shards.items() if shard == number + 1) for number in range(count)
    ]
    assert max(loads) - min(loads) <= max(map(seconds, shards), default=0.0) + 1e-6


def test_shard_gets_long_function_or_several_short_ones() -> None:
    known = [
        Duration("", f"t.py::test_{name}", 2, seconds) for name, seconds in (("a", 9.0), ("b", 5), ("c", 4))
    ]
    nodeids = [f"t.py::test_{name}[{number}]" for name in "abc" for number in range(2)]
    assert shard_of(nodeids, 2, known) == {"t.py::test_a": 1, "t.py::test_b": 2, "t.py::test_c": 2}
    # A single test of `a` takes half of its time, so `b` is the longest.
    assert shard_of(nodeids[1:], 2, known) == {"t.py::test_b": 1, "t.py::test_a": 2, "t.py::test_c": 2}


@given(durations=rows, limit_s=st.floats(0, 200))
def test_smoke_has_fastest_function_of_core_clauses_within_limit(
    durations: list[Duration], limit_s: float
) -> None:
    extension = Duration(EXTENSION, "t.py::test_x", 1, 0.0)
    chosen = smoke_functions([*durations, extension], limit_s)
    assert EXTENSION not in chosen
    fastest = {
        clause: min(row.each_s for row in durations if row.clause == clause)
        for clause in {row.clause for row in durations}
    }
    each_s = {(row.clause, row.function): row.each_s for row in durations}
    assert all(each_s[entry] == fastest[entry[0]] for entry in chosen.items())
    assert sum(fastest[clause] for clause in chosen) <= limit_s
    left = [fastest[clause] for clause in fastest.keys() - chosen.keys()]
    assert not left or sum(fastest[clause] for clause in chosen) + min(left) > limit_s


def test_first_tests_are_one_for_each_function_of_smoke() -> None:
    first, second = sorted(set(smoke_functions(durations.recorded()).values()))[:2]
    nodeids = ["other.py::test_a", f"{second}[1]", f"{first}[1]", f"{second}[2]", first]
    assert first_tests(nodeids) == [f"{second}[1]", f"{first}[1]"]


def test_recorded_functions_exist() -> None:
    assert len(smoke_functions(durations.recorded())) > 200
    for row in durations.recorded():
        gone = f"{row.function} is gone: rename it in {durations.FILE.name}, or record a run again"
        assert is_test(row.function), gone


def test_clauses_with_mark_accelerator_have_no_test_on_the_cpu() -> None:
    recorded = {row.clause for row in durations.recorded()}
    needing = {clause.id for clause in all_clauses().values() if clause.mark == "accelerator"}
    assert needing
    assert needing.isdisjoint(recorded)


def test_only_tests_that_hold_are_recorded() -> None:
    tests = [judged("passed", nodeid=f"t.py::test_a[{number}]", seconds=1.5) for number in range(2)]
    report = a_report(
        *tests, judged("failed", nodeid="t.py::test_a[2]"), judged("unavailable", nodeid="t.py::test_b")
    )
    clause = tests[0]["clause"]
    assert durations.record(report) == [Duration(clause, "t.py::test_a", 2, 3.0)]


def test_only_fastest_and_long_functions_are_recorded() -> None:
    tests = [
        judged("passed", clause=CORE[0], nodeid=f"t.py::test_{name}", seconds=seconds)
        for name, seconds in (("a", 1.0), ("b", 0.5), ("c", 3.0))
    ]
    report = a_report(*tests, judged("passed", clause="", nodeid="t.py::test_d", seconds=0.1))
    recorded = durations.record(report)
    assert [row.function for row in recorded] == ["t.py::test_b", "t.py::test_c"]
    assert smoke_functions(recorded) == {CORE[0]: "t.py::test_b"}


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", ""])
def test_wrong_shard_is_refused(text: str) -> None:
    assert options.shard("2/3") == "2/3"
    with pytest.raises(argparse.ArgumentTypeError, match="is not a shard such as 1/3"):
        options.shard(text)


@pytest.mark.parametrize("word", ["--shard=3/2", "--marks=generic,none"])
def test_wrong_option_of_pytest_is_refused(word: str) -> None:
    ended = run_pytest("--collect-only", word, "conformance/nn")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR, ended.stdout
    assert word.partition("=")[0] in ended.stderr


def test_smoke_runs_one_test_of_each_clause(tmp_path: Path) -> None:
    words = ["--subject=torch", "--profile=smoke", "conformance/nn", "conformance/cuda"]
    code, report = judge(tmp_path, words)
    assert (code, report["profile"], report["is_narrowed"]) == (0, "smoke", True)
    tested = [test["clause"] for test in report["tests"]]
    assert len(tested) == len(set(tested)) > 20
    chosen = smoke_functions(durations.recorded())
    assert all(function_of(test["nodeid"]) == chosen[test["clause"]] for test in report["tests"])
    reasons = {result["clause"]: result["reason"] for result in report["not_run"]}
    overlap = "nn.utils.clip_grad.clip_grad_norm_.extreme_gradients_survive"
    assert reasons[overlap] == "the profile smoke has no test of it; --profile quick has one"
