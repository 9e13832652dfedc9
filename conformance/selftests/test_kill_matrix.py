"""Tests that each fault turns the suite red, one test a fault in a fork of its own, and tests of the measure."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.judge import surface
from conformance.judge.clauses import all_clauses
from conformance.judge.library import Library
from conformance.judge.sandbox import environment
from conformance.selftests.misbehaving import write_files
from conformance.selftests.processes import left_processes
from conformance.selftests.sample_reports import a_kill, a_survivor, a_table, an_idle_clause
from conformance.strength.__main__ import AS_EXPECTED, NOT_JUDGED, STOPPED, main
from conformance.strength.faults import measure
from conformance.strength.faults.earlier_kills import (
    EarlierKills,
    load_earlier_kills,
    read_killers,
    remember,
    without_removed,
)
from conformance.strength.faults.handmade import HANDMADE
from conformance.strength.faults.trials import (
    all_excuses,
    candidates,
    clauses_about,
    clauses_of,
    fault_ids,
    idle_reasons,
    judge_clause,
    judge_fault,
    needs_ranks,
)
from conformance.strength.fork import Ending
from conformance.strength.order import Task, distance, likeness_to
from conformance.strength.results import KILLED, UNTESTED, Row, read_table, write_table
from conformance.strength.worker import Trial, Worker

OF_MEMORY = ("killers_are_recorded", "recorded_killers_exist", "reasons_name_existing_faults_and_clauses")
# Faults in torch, one of each type. The command has all of them.
ON_TORCH = [
    "grad_scaler.first_gradient_only",
    "grad_scaler.second_dtype_left_scaled",
    "grad_scaler.grows_on_each_step",
    "grad_scaler.pickle_loses_the_count",
    "autocast.nesting_leaks_on_exception",
    "autocast.decorated_generators_run_inside",
    "custom_fwd.casts_float64",
    "clip_grad.last_element_left_out",
    "clip_grad.norm_cached_by_address",
    "ignore:amp.GradScaler(growth_interval)",
]
KILLERS = load_earlier_kills(Path("none")).faults
GREEN: set[str] = set()  # tests that are green without a fault


@pytest.fixture(scope="module")
def worker(subject: Library) -> Iterator[Worker]:
    with Worker(subject.package) as worker:
        yield worker


def carried_out(worker: Worker, trial: Trial[Any]) -> Any:
    task = next(trial)
    try:
        while True:
            task = trial.send(worker.judge(task))
    except StopIteration as ended:
        return ended.value


def faults() -> list[Any]:
    """Return a fixed twentieth of the faults. The command and the profile deep have all, also those that need ranks."""

    def marks(fault_id: str) -> Any:
        return (
            pytest.mark.profile("deep") if needs_ranks(fault_id) or zlib.crc32(fault_id.encode()) % 20 else ()
        )

    return [pytest.param(fault_id, marks=marks(fault_id)) for fault_id in fault_ids()]


@pytest.mark.deadline(330)
@pytest.mark.parametrize("fault_id", faults())
def test_suite_kills_faults_of_impl(worker: Worker, subject: Library, fault_id: str) -> None:
    kill = carried_out(worker, judge_fault(subject.package, fault_id, GREEN, KILLERS.get(fault_id, "")))
    assert kill.is_due, f"{fault_id}: {kill.text} {kill.says}"


@pytest.mark.deadline(600)
def test_suite_kills_sample_of_faults_in_torch() -> None:
    with Worker("torch", clauses=clauses_about(ON_TORCH)) as worker:
        kills = [carried_out(worker, judge_fault("torch", fault_id, set())) for fault_id in ON_TORCH]
    assert [kill.name for kill in kills if not kill.is_due] == []


@pytest.mark.deadline(330)
@pytest.mark.parametrize("of", ["nn.utils.clip_grad.clip_grad_norm_.dtensor", "cpu.amp.grad_scaler."])
def test_suite_is_green_without_fault(worker: Worker, subject: Library, of: str) -> None:
    """A fork must allow everything that tests need, such as ranks. Otherwise they would kill any fault."""
    clauses = frozenset(clause_id for clause_id in all_clauses() if clause_id.startswith(of))
    ending = worker.judge(Task(subject.package, clauses))
    assert ending.how == "", f"{ending.nodeid}: {ending.how}"
    assert ending.tests_run >= len(clauses) > 1


@pytest.mark.deadline(120)
def test_process_exit_is_reported_with_clause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os\ndef clip_grad_value_(*args, **kwargs):\n    os._exit(0)\n"
    write_files(tmp_path, {"deadly/nn/utils/__init__.py": source})
    monkeypatch.syspath_prepend(tmp_path)
    clause = "nn.utils.clip_grad.clip_grad_value_.clamps"
    with Worker("deadly", clauses={clause}) as worker:
        twice = [worker.judge(Task("deadly", frozenset({clause}))) for _ in range(2)]
    assert [(ending.how, ending.clause) for ending in twice] == [("crash", clause)] * 2
    assert "test_clip_grad_value.py" in twice[0].nodeid


@pytest.mark.deadline(120)
def test_unjudged_fault_is_neither_killed_nor_survivor() -> None:
    clauses = clauses_of(["cpu.amp.grad_scaler"])
    with Worker("torch", clauses=clauses) as worker:
        with pytest.raises(RuntimeError, match="there is no fault 'forget:everything'"):
            worker.judge(Task("torch+forget:everything", clauses))
        assert worker.judge(Task("torch", clauses)).how == ""
    with Worker("no.such.package") as worker, pytest.raises(RuntimeError, match=r"no\.such\.package"):
        worker.judge(Task("no.such.package", clauses))


@pytest.mark.deadline(300)
@pytest.mark.parametrize(
    "blow", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.profile("full"))]
)
def test_stopped_command_ends_at_once_and_writes_known_results(
    tmp_path: Path, blow: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_MARK", uuid.uuid4().hex)
    out = tmp_path / "kills.json"
    words = [sys.executable, "-m", "conformance.strength", "faults", "--only", "custom_fwd."]
    words += ["--jobs", "1", "--out", str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline().startswith("[1/")
        os.kill(command.pid, blow)
        reported, _ = command.communicate(timeout=60)
        assert (command.returncode, reported.splitlines()[-1]) == (STOPPED, "stopped")
    assert left_processes(f"TANDEM_MARK={os.environ['TANDEM_MARK']}") == []
    table = read_table(out, "faults")
    assert not table.complete
    assert table.rows[0].outcome == KILLED


@pytest.mark.deadline(120)
def test_known_fault_is_not_judged_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "commit", lambda: "abc")
    out = tmp_path / "kills.json"
    earlier = [a_kill(fault_id) for fault_id in fault_ids() if "custom_fwd." in fault_id]
    write_table(out, a_table(*earlier[1:], seconds=7.0))
    words = ["--only", "custom_fwd.", "--jobs", "1", "--out", str(out), "--resume"]
    assert main(["faults", *words]) == AS_EXPECTED
    reported = capsys.readouterr().out
    assert "[1/1]" in reported
    assert f"{earlier[0].name}: killed" in reported
    assert f"{len(earlier)} of {len(earlier)} killed" in reported
    table = read_table(out, "faults")
    assert not table.complete, "there are other faults, which nobody has judged"
    assert table.began.startswith("2026-01-01")
    assert table.seconds > 7
    assert [row.name for row in table.rows] == [row.name for row in (*earlier[1:], earlier[0])]


@pytest.mark.parametrize(
    ("subject", "commit", "reported"),
    [
        ("torch", "abc", "has the subject torch, expected impl"),
        ("impl", "def", "has the commit def, expected abc"),
        ("impl", "abc-dirty", "no commit (abc-dirty); run without"),
        ("impl", "", "no commit (unknown); run without"),
    ],
)
def test_different_run_is_not_resumed(
    tmp_path: Path,
    subject: str,
    commit: str,
    reported: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = commit if commit in ("", "abc-dirty") else "abc"
    monkeypatch.setattr(environment, "commit", lambda: here)
    out = tmp_path / "kills.json"
    write_table(out, a_table(a_kill("f"), subject=subject, commit=commit))
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        main(["faults", "--out", str(out), "--resume"])
    assert reported in capsys.readouterr().err
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"rows": [{"name": "x"}]}', json.dumps(asdict(a_table())), "\xff"]
)
def test_foreign_file_is_rejected_as_table(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "kills.json"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"no table of mutation|is a table of faults"):
        read_table(file, "mutation")


@pytest.mark.parametrize(
    ("row", "why", "is_due", "reported"),
    [
        (a_kill("f"), "", True, "1 of 1 killed"),
        (a_survivor("f"), "", False, "f: SURVIVED"),
        (a_survivor("f"), "none can", True, "f: survived, reason: none can"),
        (a_kill("f"), "none can", False, "STALE REASON: none can"),
        (an_idle_clause("c", 3, "f"), "", True, "0 of 0 killed"),
        (an_idle_clause("c", 3), "", False, "c: KILLS NONE OF 3"),
        (an_idle_clause("c", 3), "no fault can", True, "kills none of 3, reason: no fault can"),
        (an_idle_clause("c", 3, "f"), "no fault can", False, "STALE REASON: no fault can"),
    ],
)
def test_reason_excuses_survivor_until_stale(row: Row, why: str, is_due: bool, reported: str) -> None:
    lines: list[str] = []
    options = argparse.Namespace(remember=False)
    assert measure.sum_up(options, a_table(replace(row, why=why)), lines.append) is not is_due
    assert reported in "\n".join(lines)


def end_on_red(trials: Iterable[Trial[Any]]) -> None:
    """End every task with the same red test, whatever is injected."""
    for trial in trials:
        next(trial)
        with contextlib.suppress(StopIteration):
            while True:
                trial.send(Ending("failed", "t", "a.clause"))


def fail_to_run(trials: Iterable[Trial[Any]]) -> None:
    raise RuntimeError("pytest ended with code 4")


@pytest.mark.parametrize(
    ("run", "reported"),
    [
        (end_on_red, "impl is red without a fault: "),
        (fail_to_run, "stopped, because pytest ended with code 4"),
    ],
)
def test_run_that_cannot_judge_kills_nothing(
    run: Callable[[Any], None],
    reported: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pool = contextlib.nullcontext(SimpleNamespace(run=run))
    monkeypatch.setattr(measure, "WorkerPool", lambda *args, **options: pool)
    out = tmp_path / "kills.json"
    assert main(["faults", "--only", "custom_fwd.", "--out", str(out)]) == NOT_JUDGED
    assert reported in capsys.readouterr().out
    assert not out.exists()


def test_test_is_checked_once_without_fault() -> None:
    fault, green = "custom_fwd.casts_float64", set[str]()

    def asked() -> Iterator[str]:
        trial = judge_fault("impl", fault, green)
        yield next(trial).spec
        with contextlib.suppress(StopIteration):
            yield trial.send(Ending("failed", "t", "a.clause")).spec
            trial.send(Ending())

    assert list(asked()) == [f"impl+{fault}", "impl"]
    assert list(asked()) == [f"impl+{fault}"]
    assert green == {"t"}


@pytest.mark.deadline(120)
def test_earlier_killers_run_first(tmp_path: Path, worker: Worker, subject: Library) -> None:
    """The earlier run may be of another commit. A task that names only its first test runs nothing else."""
    fault, by = (
        "older.cuda_region_on_the_cpu",
        "conformance/cuda/amp/test_autocast_mode.py::test_region_matches_torch[defaults-here]",
    )
    out = tmp_path / "kills.json"
    write_table(out, a_table(a_kill(fault, by), subject="torch", commit="def"))
    words = ["--subject", subject.package, "--only", fault, "--jobs", "1", "--out", str(out)]
    assert main(["faults", *words]) == AS_EXPECTED
    assert [row.nodeid for row in read_table(out, "faults").rows] == [by]
    ending = worker.judge(Task(subject.package, frozenset(), first=by))
    assert (ending.how, ending.tests_run) == ("", 1)


def test_clause_of_other_profile_is_reported(worker: Worker, subject: Library) -> None:
    row = carried_out(worker, judge_clause(subject.package, "dynamo.optimizer.values.inductor", set()))
    assert (row.outcome, row.tried, row.fault, row.is_due) == (UNTESTED, 0, "", True)


def test_killers_are_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file records killers that took long.

    A survivor keeps its killer, and a user's own matrix takes precedence.
    """
    a, b, c, d = list(HANDMADE)[:4]
    clause = next(iter(all_clauses()))
    old, new, own = (f"conformance/selftests/test_kill_matrix.py::test_{name}" for name in OF_MEMORY)
    monkeypatch.setattr(
        "conformance.strength.faults.earlier_kills._FILE", killers_file := tmp_path / "killers.json"
    )
    killers_file.write_text(json.dumps({old: [a, b, "gone"], f"{old}_gone": [ON_TORCH[0]]}))
    rows = [a_kill(a, new), a_survivor(b), a_kill(c, old, seconds=60.0), a_kill(d, new)]
    remember(a_table(*rows))
    out = tmp_path / "kills.json"
    assert load_earlier_kills(out) == EarlierKills({a: new, b: old, c: old}, {})
    write_table(out, a_table(a_kill(c, own), an_idle_clause(clause, 1, c)))
    assert load_earlier_kills(out) == EarlierKills({a: new, b: old, c: own}, {clause: c})


def test_recorded_killers_exist() -> None:
    removed = read_killers().items() - without_removed(read_killers()).items()
    assert not removed, (
        f"killers.json names faults or tests that do not exist: {sorted(removed)}; "
        "run python -m conformance.strength faults --only FAULT --remember"
    )


def test_reasons_name_existing_faults_and_clauses() -> None:
    for subject, rows in all_excuses().items():
        assert subject in ("impl", "torch")
        assert rows.keys() <= set(fault_ids())
    assert idle_reasons().keys() <= all_clauses().keys()
    assert all([*idle_reasons().values(), *(why for rows in all_excuses().values() for why in rows.values())])


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["faults", "--only", "no such fault"], "no fault has 'no such fault' in its name"),
        (["faults", "--only", "custom_fwd", "--clauses"], "remove --only"),
        (["faults", "--jobs", "0"], "--jobs is 0"),
        (
            ["mutation", "--show", "amp.grad_scaler:no_such_operator:0"],
            "has no mutant 'amp.grad_scaler:no_such",
        ),
    ],
)
def test_mistakes_in_command_are_reported_before_run(
    words: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == NOT_JUDGED
    assert reported in capsys.readouterr().err


def test_faults_are_listed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--list", "--only", "custom_fwd."]) == AS_EXPECTED
    assert capsys.readouterr().out.split() == [name for name in HANDMADE if name.startswith("custom_fwd.")]


def test_nearest_clauses_run_first() -> None:
    near, far = "amp.grad_scaler.unscale_.divides", "amp.grad_scaler.sequences.any"
    assert distance(near, "amp.GradScaler.unscale_") == 0
    assert distance(far, "amp.GradScaler.unscale_") == 1
    assert distance("amp.grad_scaler.getters.answer", "amp.GradScaler.unscale_(optimizer)") == 2
    assert distance("nn.utils.clip_grad.refusal_is_whole", "amp.GradScaler.unscale_") == 2
    assert distance("", "amp.GradScaler.unscale_") == 2


def test_every_clause_has_faults_to_try() -> None:
    tried = {clause_id: candidates(clause_id) for clause_id in all_clauses()}
    assert [clause_id for clause_id, faults in tried.items() if not faults] == []
    assert [clause_id for clause_id, faults in tried.items() if len(set(faults)) < len(faults)] == []


def test_most_similar_fault_is_tried_first() -> None:
    reported = {"a": "gradients divided twice", "b": "gradients are kept", "c": "buffers are divided twice"}
    likeness = likeness_to("Dividing: each gradient is divided once, not twice.", reported)
    assert sorted(reported, key=lambda fault: -likeness[fault]) == ["a", "c", "b"]
    clause_id = "amp.grad_scaler.unscale_.divides"
    tried = candidates(clause_id)
    for first in ("", tried[5]):
        assert next(judge_clause("torch", clause_id, set(), first)).spec == f"torch+{first or tried[0]}"


def test_every_fault_names_existing_surface_item() -> None:
    """Only known components are allowed: an unknown one would silently put the nearest tests last."""
    real = set(map(str, surface.items()))
    assert [fault.id for fault in HANDMADE.values() if fault.about not in real] == []
