"""Expected failures: not red while tests fail, reported once they pass or the date has passed."""

from __future__ import annotations

import datetime
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from conformance.judge.files.claims_file import Expectation
from conformance.judge.files.expectations import Expectations, TestRecord, without_shrinking
from conformance.selftests.misbehaving import write_subject
from conformance.selftests.test_misbehaving_subjects import MISUSED, OTHERS, judged, judged_by_workers, of

TODAY = datetime.date(2026, 5, 1)
CLAUSE = "amp.grad_scaler.x"
ON_THE_CPU = UNSAID, SAID, _ = [f"{MISUSED}[cpu-{foreach}]" for foreach in (None, True, False)]


def expectation(clause: str = "", test: str = "", expires: datetime.date = TODAY) -> Expectation:
    return Expectation(clause, test, "It is so.", expires)


@pytest.mark.parametrize(
    ("outcomes", "draws", "is_complete", "state", "is_red"),
    [
        ([], False, True, "not asked", False),
        (["unavailable", "not provided"], False, True, "not asked", False),
        (["expected", "passed"], False, True, "holds", False),
        (["expected"], True, False, "holds", False),
        (["passed", "known"], False, True, "met", True),
        (["passed", "unavailable"], True, True, "met", False),
        (["passed"], False, False, "met", False),
    ],
)
def test_expected_clause_outcome(
    outcomes: list[str], draws: bool, is_complete: bool, state: str, is_red: bool
) -> None:
    tests = [TestRecord(f"test_{n}", CLAUSE, outcome, draws) for n, outcome in enumerate(outcomes)]
    [result] = Expectations([expectation(CLAUSE)], TODAY).evaluate(
        [*tests, TestRecord("y", "y", "failed", False)], is_complete=is_complete
    )
    assert (result.state, result.is_red) == (state, is_red)


def test_passing_test_is_reported_among_others() -> None:
    [result] = Expectations([expectation(test="a")], TODAY).evaluate(
        [TestRecord("a[1]", "", "passed", False)], is_complete=False
    )
    assert (result.state, result.is_red) == ("met", True)


def test_expired_expectation_is_red() -> None:
    expectations = Expectations([expectation(CLAUSE, expires=TODAY - datetime.timedelta(1))], TODAY)
    assert expectations.find("a", CLAUSE) is None
    [result] = expectations.evaluate([TestRecord("a", CLAUSE, "failed", True)], is_complete=False)
    assert (result.state, result.is_red) == ("expired", True)


def test_more_specific_expectation_is_used() -> None:
    rows = [expectation(CLAUSE), *(expectation(test=test) for test in ("test_x", "test_x[cpu]", "test_y"))]
    expectations = Expectations(rows, TODAY)
    assert expectations.find("test_x[cpu]", CLAUSE) == rows[2]
    assert expectations.find("test_x[cuda]", CLAUSE) == rows[1]
    assert expectations.find("test_z[cuda]", CLAUSE) == rows[0]
    assert expectations.find("test_y[cuda]", "") == rows[3]
    assert expectations.find("test_yes", "") is None


def test_expected_failure_is_not_shrunk() -> None:
    tried: list[int] = []

    @hypothesis.settings(database=None, derandomize=True, max_examples=50)
    @hypothesis.given(st.integers())
    def above_1000(number: int) -> None:
        tried.append(number)
        assert number < 1000

    examples: list[int] = []
    for context in (without_shrinking(above_1000), without_shrinking(None)):
        tried.clear()
        with context, pytest.raises(AssertionError):
            above_1000()
        examples.append(tried[-1])
    assert examples[0] > 1000
    assert examples[1] == 1000


SOURCE = """
import os, torch
from conformance.selftests.misbehaving import clipping

def clip_grad_value_(parameters, clip_value, foreach=None):
    if foreach is None:
        return {instead}
    torch.nn.utils.clip_grad_value_(parameters, clip_value, foreach)

nn = clipping(clip_grad_value_=clip_grad_value_)
"""
# Both do something else if foreach is not passed.
CLAMPS_NOTHING, ENDS_ITS_PROCESS = SOURCE.format(instead="None"), SOURCE.format(instead="os._exit(3)")


def write(folder: Path, source: str, *tests: str, expires: str = "2030-01-31") -> None:
    rows = [
        f"[[expectations]]\ntest = {test!r}\nreason = 'Known.'\nlink = 'their/repo#1'\nexpires = {expires}\n"
        for test in tests
    ]
    write_subject(folder, "expects", "".join(rows), source)


def test_expected_failures_are_green_and_others_red(tmp_path: Path) -> None:
    write(tmp_path, CLAMPS_NOTHING, UNSAID)
    report = judged("expects", tmp_path, *ON_THE_CPU, f"--today={TODAY}")
    expected = of(report, UNSAID)[0]
    assert expected["outcome"] == "expected"
    assert expected["reason"].startswith("expected until 2030-01-31: Known. (their/repo#1)\nAssertionError")
    assert "--subject expects" in expected["replay"]
    assert {entry["outcome"] for entry in report["tests"]} == {"expected", "passed"}
    assert [(row["state"], row["outcome"]) for row in report["expectations"]] == [("holds", "expected")]
    assert (report["verdict"], report["exit code"]) == ("green", 0)


def test_passing_or_expired_expectation_is_red(tmp_path: Path) -> None:
    write(tmp_path, CLAMPS_NOTHING, UNSAID, SAID)
    report = judged("expects", tmp_path, *ON_THE_CPU, f"--today={TODAY}")
    [met] = of(report, "expectation of")
    assert (met["nodeid"], met["outcome"]) == (f"expectation of {SAID}", "stale")
    assert met["clause"] == "nn.utils.clip_grad.clip_grad_value_.foreach"
    assert "all its tests pass: remove it" in met["reason"]
    assert (report["verdict"], report["exit code"]) == ("red", 1)
    later = judged("expects", tmp_path, *ON_THE_CPU, "--today=2030-02-01")
    assert [row["state"] for row in later["expectations"]] == ["expired", "expired"]
    assert of(later, UNSAID)[0]["outcome"] == "failed"
    assert (later["verdict"], later["exit code"]) == ("red", 1)


@pytest.mark.deadline(300.0)
def test_process_exit_can_be_expected(tmp_path: Path) -> None:
    elsewhere = f"{MISUSED}[meta-None]"
    write(tmp_path, ENDS_ITS_PROCESS, UNSAID)
    report = judged_by_workers("expects", tmp_path, *ON_THE_CPU, elsewhere, OTHERS, f"--today={TODAY}")
    assert of(report, UNSAID)[0]["outcome"] == "expected"
    assert of(report, elsewhere)[0]["outcome"] == "crash"
    assert {entry["outcome"] for entry in of(report, OTHERS)} == {"passed"}
    assert [row["state"] for row in report["expectations"]] == ["holds"]
    assert report["exit code"] == 1
