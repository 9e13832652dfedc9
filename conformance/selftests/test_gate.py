"""Components of the gate: the reasons for red, progress, timing, and the report of a stopped gate."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from conformance.cli import gate
from conformance.cli.judging import _JudgingBar, _Lines, _salvaged
from conformance.cli.options import of_gate
from conformance.cli.running import Stop
from conformance.cli.terminal import progress_on
from conformance.judge.accounting import NotRun
from conformance.judge.clauses import all_clauses
from conformance.judge.judgement import Judgement
from conformance.judge.results import verdict
from conformance.judge.sandbox.marked_processes import marked_processes
from conformance.report.verdict import parts, reasons
from conformance.selftests.processes import ROOT, left_processes
from conformance.selftests.sample_reports import CLAUSE, a_report, judged, trained

# Collect few tests for a gate that is stopped, because importing them takes longer than running twenty.
_COLLECTED = " ".join(f"--ignore=conformance/{folder}" for folder in ("distributed", "dynamo"))


@pytest.mark.parametrize("outcome", ["failed", "hang", "crash", "stale"])
def test_red_outcomes_are_reasons(outcome: str) -> None:
    assert reasons(a_report(judged("passed"), judged(outcome))) == [f"1 test {outcome}"]


@pytest.mark.parametrize(
    "outcome", ["passed", "known", "unavailable", "not provided", "reference cannot run here"]
)
def test_other_outcomes_are_none(outcome: str) -> None:
    assert reasons(a_report(judged(outcome))) == []


def test_each_part_can_be_the_reason() -> None:
    failed = {"name": "clip", "outcome": "failed", "why": "it broke"}
    assert reasons(a_report(speed={"rows": [failed]})) == ["benchmark clip failed: it broke"]
    assert reasons(a_report(training={"runs": [trained(False)]})) == ["training bf16: bits: said <b>so</b>"]
    assert reasons(a_report(training={"error": "no end"})) == ["no end"]
    assert reasons(a_report(ended_early=["stopped by the user"])) == ["stopped by the user"]


def test_subject_without_judged_names_is_red() -> None:
    lacking = NotRun(CLAUSE["id"], "not provided", "impl does not provide amp.GradScaler")
    results = [lacking, NotRun("x", "not claimed", ""), NotRun("y", "not run", "")]
    names = frozenset({"nn.utils.clip_grad_norm_"})
    assert verdict([], frozenset()) == "red"
    assert verdict(results, names) == "red"
    assert verdict([*results, Judgement(**judged("passed"))], names) == "green"
    assert verdict(results[1:], names) == "green"
    (reason,) = reasons(a_report(provides_nothing=True, not_run=[asdict(lacking)]))
    expected = "impl provides none of the names that are judged, such as amp.GradScaler; expose them"
    assert reason.startswith(expected)


def test_red_report_says_nothing_about_other_package() -> None:
    """A report that is drawn again may be red because of its speed or training only."""
    report = a_report(judged("passed"), verdict="red", training={"error": "no end"})
    assert [part.reasons for part in parts(report)] == [[], [], ["no end"]]


def test_judgements_before_crash_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "judgements.jsonl"
    # The first test has two lines because it failed in its teardown.
    entries = [
        {"collected": 2, "first": []},
        *(judged(outcome, nodeid="test_x") for outcome in ("passed", "failed")),
    ]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"nodeid": "half')
    options = of_gate("").parse_args([])
    report = _salvaged(options, log, 0.0, "judging ended with code 3")
    assert [(test["nodeid"], test["outcome"]) for test in report["tests"]] == [("test_x", "failed")]
    assert {entry["clause"] for entry in report["not_run"]} == all_clauses().keys()
    assert reasons(report | {"speed": {}, "training": {}}) == ["judging ended with code 3", "1 test failed"]
    options.what = ["nn"]
    outcomes = {
        entry["clause"]: entry["reason"] for entry in _salvaged(options, log, 0.0, "killed")["not_run"]
    }
    assert {name.partition(".")[0] for name, reason in outcomes.items() if reason == "killed"} == {"nn"}
    assert set(outcomes.values()) == {"killed", "no test of it was selected"}


@given(data=st.data())
def test_each_line_of_a_growing_log_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The writer may flush in the middle of a line or of a character."""
    entries = [{"nodeid": f"test_{i}", "reason": "ä" * data.draw(st.integers(0, 9))} for i in range(6)]
    written = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)))) | {0, len(written)})
    log = tmp_path_factory.mktemp("log") / "judgements.jsonl"
    lines, entries_read = _Lines(log), []
    assert list(lines.new()) == []  # no log file yet
    for start, stop in itertools.pairwise(cuts):
        with log.open("ab") as file:
            file.write(written[start:stop])
        entries_read += lines.new()
        assert entries_read == entries[: written[:stop].count(b"\n")]
    assert list(lines.new()) == []


def test_progress_bar_follows_log(tmp_path: Path) -> None:
    log = tmp_path / "judgements.jsonl"
    written = io.StringIO()
    progress = Progress(console=Console(file=written, width=200))
    bar = _JudgingBar(progress, progress.add_task("judging", total=None, note=""), log)

    def after(*entries: dict[str, Any]) -> tuple[float | None, float, str]:
        with log.open("a") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)
        bar.advance()
        shown = progress.tasks[0]
        return shown.total, shown.completed, shown.fields["note"]

    assert after() == (None, 0, "collecting")
    # All workers report the same number of collected tests.
    collected = {"collected": 3, "first": ["one", "two"]}
    assert after(collected, collected) == (3, 0, "collecting")
    assert after(judged("passed", nodeid="one")) == (3, 1, "")
    assert after() == (3, 1, "")
    assert written.getvalue() == ""
    assert after(judged("failed", nodeid="two")) == (3, 2, "1 red")
    assert written.getvalue().startswith(
        "first 2 tests, one for each function of the profile smoke: 1 red after "
    )
    assert after(collected, judged("failed", nodeid="three")) == (3, 3, "2 red")
    assert written.getvalue().count("first 2 tests") == 1


def test_log_gets_line_of_progress_every_30_seconds() -> None:
    log, now = io.StringIO(), 0.0
    with progress_on(Console(file=log, get_time=lambda: now)) as progress:
        task = progress.begin("judging")
        for second in range(65):
            now = float(second)
            progress.update(task, total=100, completed=second, note="2 red")
        assert log.getvalue().splitlines() == [
            "judging …",
            "judging 0:00:30, 30 of 100 tests, 2 red",
            "judging 0:01:00, 60 of 100 tests, 2 red",
        ]


def test_phase_without_tests_prints_elapsed_time() -> None:
    log, now = io.StringIO(), 0.0
    with progress_on(Console(file=log, get_time=lambda: now)) as progress:
        task = progress.begin("timing")
        now = 31.0
        progress.update(task)
        now = 62.0
        progress.update(task, total=1, completed=1)
        assert log.getvalue().splitlines() == ["timing …", "timing 0:00:31"]


def test_terminal_gets_no_progress_lines() -> None:
    log, now = io.StringIO(), 0.0
    with progress_on(Console(file=log, get_time=lambda: now, force_terminal=True)) as progress:
        task = progress.begin("judging")
        now = 31.0
        progress.update(task, completed=1)
        assert "judging …" not in log.getvalue()
        assert "judging 0:00:31" not in log.getvalue()


@pytest.mark.parametrize("subject", ["impl", "mine"])
def test_timing_gets_machine_and_records_result_of_impl_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, subject: str
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(gate, "_run_phase", lambda name, command, *_: commands.append(command) or {})
    options, _ = gate._options([f"--subject={subject}", "--machine=lab", "--device=cpu", f"--out={tmp_path}"])
    (tmp_path / "point.json").write_text("of an earlier run")
    reported = gate._time(options, tmp_path, Progress(), Stop())
    assert reported == {
        "command": f"python -m benchmarks --quick --subject={subject} --machine=lab --device=cpu"
    }
    assert (f"--point={tmp_path / 'point.json'}" in commands[0]) == (subject == "impl")
    assert not (tmp_path / "point.json").exists()


@pytest.mark.deadline(300)
@pytest.mark.parametrize(
    "blow", [pytest.param(signal.SIGINT, marks=pytest.mark.profile("full")), signal.SIGTERM]
)
def test_stopped_gate_reports_results_and_starts_nothing(tmp_path: Path, blow: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-m", "conformance.cli.gate", "--subject=torch", f"--out={tmp_path}"],
        cwd=ROOT,
        env=os.environ
        | {"TANDEM_MARK": mark, "PYTEST_ADDOPTS": _COLLECTED, "PYTEST_XDIST_AUTO_NUM_WORKERS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as gate:
        try:
            while gate.poll() is None and _judged_tests(tmp_path) < 20:
                time.sleep(0.1)
            os.killpg(gate.pid, blow)
            reported, _ = gate.communicate(timeout=60)
        # The deadline of this test is among these errors. A running gate would disturb other tests.
        except BaseException:
            for left in marked_processes(f"TANDEM_MARK={mark}"):
                os.kill(left, signal.SIGKILL)
            raise
    report = json.loads((tmp_path / "report.json").read_text())
    assert (gate.returncode, report["verdict"]) == (1, "red"), reported
    assert "stopped by the user" in report["reasons"]
    assert len(report["tests"]) >= 20
    assert report["speed"] == report["training"] == {}
    assert "stopped by the user" in (tmp_path / "index.html").read_text()
    assert not (tmp_path / "timing.log").exists()
    assert left_processes(f"TANDEM_MARK={mark}") == []


def _judged_tests(folder: Path) -> int:
    log = folder / "judgements.jsonl"
    return log.read_text().count('"nodeid"') if log.is_file() else 0
