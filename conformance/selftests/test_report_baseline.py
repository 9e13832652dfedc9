"""Comparison of two runs: what broke, was fixed, added or removed, and became slower or faster, and bad files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.cli import gate
from conformance.judge.judgement import RED
from conformance.report import write_page
from conformance.report.baseline import BaselineComparison, compare, exit_code_since, read_report, sentences
from conformance.report.matrix import SEVERITY
from conformance.selftests.sample_reports import (
    CLAUSE,
    a_report,
    judged,
    not_timed,
    timed,
    trained,
)

CHANGES = ("broke", "fixed", "changed", "new", "gone", "slower", "faster")


def reported(comparison: BaselineComparison) -> dict[str, list[tuple[str, list[str]]]]:
    """Return the changes by type, without types that have none."""
    kinds = {kind: getattr(comparison, kind) for kind in CHANGES}
    return {
        kind: [(change.name, getattr(change, "tests", [])) for change in changes]
        for kind, changes in kinds.items()
        if changes
    }


outcomes = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(SEVERITY))


@given(then=outcomes, now=outcomes)
def test_each_test_is_reported_once_and_only_if_it_changed(then: dict[str, str], now: dict[str, str]) -> None:
    old, new = (
        a_report(*(judged(outcome, nodeid=name) for name, outcome in run.items())) for run in (then, now)
    )
    kinds: dict[str, str] = {}
    for kind, changes in reported(compare(old, new)).items():
        for name in (test for _, tests in changes for test in tests):
            assert name not in kinds
            kinds[name] = kind

    def kind_of(name: str) -> str:
        if name not in now:
            return "gone"
        if name not in then:
            return "new"
        if (then[name], now[name]) == ("passed", "not provided"):
            return "broke"
        was_red, is_red = then[name] in RED, now[name] in RED
        if was_red != is_red:
            return "broke" if is_red else "fixed"
        return "" if is_red or then[name] == now[name] else "changed"

    expected = {name: kind_of(name) for name in then.keys() | now.keys()}
    assert kinds == {name: kind for name, kind in expected.items() if kind}


@pytest.mark.parametrize(
    ("then", "now", "more", "code"),
    [
        ("failed", "failed", {}, 0),
        ("passed", "known", {}, 0),
        ("passed", "failed", {}, 1),
        ("passed", "hang", {}, 1),
        ("passed", "not provided", {}, 1),
        ("unavailable", "not provided", {}, 0),
        ("passed", "passed", {"ended_early": ["stopped"]}, 1),
        ("passed", "passed", {"bad_input": ["no package"]}, 2),
    ],
)
def test_exit_code_since_earlier_run(then: str, now: str, more: dict[str, Any], code: int) -> None:
    old, new = (a_report(judged(outcome, nodeid="a")) for outcome in (then, now))
    assert exit_code_since(compare(old, new), new | more) == code


def test_lost_name_is_broken_although_no_test_ran() -> None:
    lost = [{"clause": CLAUSE["id"], "outcome": "not provided", "reason": "lost"}]
    had, lacks = a_report(judged("passed", nodeid="a")), a_report(not_run=lost)
    assert reported(compare(had, lacks)) == {"broke": [(CLAUSE["id"], ["a"])]}
    assert reported(compare(lacks, had)) == {"changed": [(CLAUSE["id"], ["a"])]}
    assert reported(compare(lacks, a_report(judged("failed", nodeid="a")))) == {
        "broke": [(CLAUSE["id"], ["a"])]
    }
    unselected = [lost[0] | {"outcome": "not run"}]
    assert reported(compare(had, a_report(not_run=unselected))) == {"gone": [(CLAUSE["id"], ["a"])]}


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (None, "1/3", {"broke": ["a"], "new": ["added"]}),
        ("1/3", None, {"broke": ["a"], "gone": ["removed"]}),
        ("1/3", "2/3", {"broke": ["a"]}),
        ("1/3", "1/3", {"broke": ["a"], "new": ["added"], "gone": ["removed"]}),
        (None, None, {"broke": ["a"], "new": ["added"], "gone": ["removed"]}),
    ],
)
def test_tests_of_other_shards_are_neither_new_nor_removed(
    then: str | None, now: str | None, expected: dict[str, list[str]]
) -> None:
    old = a_report(judged("passed", nodeid="a"), judged("passed", nodeid="removed"), shard=then)
    new = a_report(judged("failed", nodeid="a"), judged("passed", nodeid="added"), shard=now)
    changes = compare(old, new)
    assert reported(changes) == {kind: [(CLAUSE["id"], tests)] for kind, tests in expected.items()}
    names = [shard or "all tests" for shard in (now, then)]
    difference = "shard (tests of other shards are not compared): {}, in the baseline {}".format(*names)
    assert changes.differs == ([] if then == now else [difference])


def test_changes_are_reported_by_clause_and_own_tests_by_name() -> None:
    names = ("a", "b", "c")
    old = a_report(
        *(judged("passed", nodeid=name) for name in names), judged("failed", nodeid="o", clause="")
    )
    new = a_report(
        *(judged("failed", nodeid=name) for name in names), judged("passed", nodeid="o", clause="")
    )
    assert reported(compare(old, new)) == {
        "broke": [(CLAUSE["id"], ["a", "b", "c"])],
        "fixed": [("o", ["o"])],
    }


def test_new_tests_that_are_red_come_first_and_own_ones_by_file() -> None:
    own = [judged("passed", nodeid=f"own.py::{n}", clause="") for n in "ab"]
    new = a_report(*own, judged("failed", nodeid="x", clause="z"), judged("passed", nodeid="y", clause="c"))
    comparison = compare(a_report(), new)
    assert reported(comparison) == {
        "new": [("z", ["x"]), ("c", ["y"]), ("own.py", ["own.py::a", "own.py::b"])]
    }
    assert [change.note for change in comparison.new] == ["failed", "", ""]
    assert sentences(comparison)[0].endswith("3 with new tests (1 red)")


intervals = st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)).map(sorted)


@given(was=intervals, now=intervals)
def test_slower_and_faster_only_if_the_intervals_do_not_overlap(was: list[float], now: list[float]) -> None:
    comparison = compare(
        a_report(speed={"rows": [timed("a", *was)]}), a_report(speed={"rows": [timed("a", *now)]})
    )
    assert bool(comparison.slower) == (now[0] > was[1])
    assert bool(comparison.faster) == (now[1] < was[0])
    assert reported(comparison).keys() <= {"slower", "faster"}


def test_benchmarks_and_training_break_and_are_fixed() -> None:
    good = a_report(speed={"rows": [timed("a", 1, 2), timed("b", 1, 2)]}, training={"runs": [trained(True)]})
    bad = a_report(
        speed={"rows": [not_timed("a", "no"), timed("c", 1, 2)]}, training={"runs": [trained(False)]}
    )
    both = [("benchmark a[cpu]", []), ("training bf16", [])]
    only = {"b": [("benchmark b[cpu]", [])], "c": [("benchmark c[cpu]", [])]}
    assert reported(compare(good, bad)) == {"broke": both, "new": only["c"], "gone": only["b"]}
    assert reported(compare(bad, good)) == {"fixed": both, "new": only["b"], "gone": only["c"]}
    untimed = a_report(training={"runs": [trained(True)]})
    assert reported(compare(good, untimed)) == reported(compare(untimed, good)) == {}


def test_differences_between_compared_runs_are_reported(tmp_path: Path) -> None:
    old = a_report(judged("passed", device="cuda"), subject="torch", profile="full", seed=3)
    new = a_report(judged("passed", device="cpu"))
    differs = compare(old, new).differs
    assert [line.split(":")[0] for line in differs] == ["subject", "profile", "seed", "devices"]
    assert differs[0] == "subject: impl, in the baseline torch"
    write_page(new | {"baseline": asdict(compare(old, new))}, tmp_path / "index.html")
    assert "subject: impl, in the baseline torch" in (tmp_path / "index.html").read_text()
    assert any(differs[0] in line for line in sentences(compare(old, new)))


def test_terminal_output_is_short() -> None:
    old = a_report(*(judged("passed", nodeid=f"t{n}", clause=f"c{n}") for n in range(50)))
    new = a_report(*(judged("failed", nodeid=f"t{n}", clause=f"c{n}") for n in range(50)), subject="other")
    lines = sentences(compare(old, new))
    assert len(lines) <= 5
    assert "50 broke" in lines[0]
    assert lines[-1] == "  broke: c0; c1; c10 and 47 more"
    assert sentences(compare(old, old))[0].endswith("no difference")


def file_of(content: Any, folder: Path) -> Path:
    file = folder / "report.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


FOREIGN = [
    ("{", "not JSON"),
    ([], "lacks verdict"),
    ({"tests": []}, "lacks verdict"),
    (a_report() | {"tests": [{"name": "of another tool"}]}, "not a report of this gate"),
    (a_report() | {"tests": 3}, "not a report of this gate"),
]


@pytest.mark.parametrize(("content", "reported"), FOREIGN, ids=[reported for _, reported in FOREIGN])
def test_foreign_file_raises(content: Any, reported: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reported):
        read_report(file_of(content, tmp_path))


@pytest.mark.parametrize("name", ["nowhere.json", "report.json"])
def test_gate_checks_baseline_before_running(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of("[]", tmp_path).with_name(name)
    with pytest.raises(SystemExit) as ended:
        gate.main(["--baseline", str(file), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gate_compares_with_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parts that run for minutes are replaced by what they would hand over; all else is the gate's own way."""
    now = a_report(judged("failed", nodeid="x", replay="python -m pytest x"))
    monkeypatch.setattr(gate, "judge", lambda *rest: now)
    monkeypatch.setattr(gate, "_time", lambda *rest: {"rows": [timed("a", 1, 2)], "command": "c"})
    monkeypatch.setattr(gate, "_train", lambda *rest: {"runs": [trained(True)]})
    earlier = file_of(a_report(judged("passed", nodeid="x")), tmp_path)
    out = tmp_path / "out"
    assert gate.main(["--baseline", str(earlier), "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "1 broke" in printed
    assert "broken amp.grad_scaler.x: failed in 1 of 1 test" in printed
    assert "judging: 1 of 1 clause broken" in printed
    assert printed.splitlines()[-1] == f"RED impl; the report is {out / 'index.html'}"
    page = (out / "index.html").read_text()
    assert "Comparison with the baseline" in page
    # A written report can be a baseline, even though it contains a comparison itself.
    assert reported(compare(read_report(out / "report.json"), now)) == {}


@pytest.mark.parametrize(
    ("chosen", "ran"),
    [
        ([], ["_time", "_train"]),
        (["--parts", "judging"], []),
        (["--parts", "training,judging"], ["_train"]),
    ],
)
def test_gate_runs_requested_phases(
    chosen: list[str], ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gate, "judge", lambda *rest: a_report(judged("passed")))
    for part in ("_time", "_train"):
        monkeypatch.setattr(gate, part, lambda *rest, part=part: calls.append(part) or {})
    assert gate.main([*chosen, "--out", str(tmp_path)]) == 0
    assert calls == ran


@pytest.mark.parametrize("text", ["timing", "judging,speed", "", "judging,"])
def test_phases_without_judging_raise(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gate.main(["--parts", text])
    assert ended.value.code == 2
    assert "that includes judging" in capsys.readouterr().err
