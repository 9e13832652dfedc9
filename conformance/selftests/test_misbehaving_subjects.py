"""Results of subjects that hang, die, leak, print, patch or change foreign state, and effects on other tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.judge.accounting import clauses_of_file
from conformance.judge.judgement import RED
from conformance.judge.results import BAD_INPUT
from conformance.judge.sandbox import trial
from conformance.judge.sandbox.notes import Notes
from conformance.selftests.misbehaving import written
from conformance.selftests.processes import ROOT, run_pytest

VALUE = "conformance/nn/utils/test_clip_grad_value.py"
NORM = "conformance/nn/utils/test_clip_grad.py"
TOTAL = "conformance/nn/utils/test_clip_grad_total_norm.py"
CPU_ALONE = f"{VALUE}::test_clamps_values"  # four that call `clip_grad_value_` and need nothing else
MISUSED = f"{VALUE}::test_clamping_foreach"  # eight tests that call `clip_grad_value_`
OTHERS = f"{NORM}::test_norm_types_on_the_edge"  # five that do not
SCALER = "conformance/amp/test_grad_scaler_construct.py::test_bad_arguments"  # needs `amp`
# Takes no subject.
TORCH_ALONE = (
    "conformance/distributed/fsdp/test_fsdp_summon.py::test_torch_cannot_offload_summoned_parameters_on_a_cpu"
)
EXTENSION = "conformance/amp/test_grad_scaler_extras.py::test_results_of_step_raise_before_first_step"
# Asks nothing of the subject but on ranks.
ON_RANKS = "conformance/distributed/fsdp/test_fsdp_desync.py::test_changes_on_all_ranks_train"
# Compares the errors of ranks.
WRITING = "conformance/distributed/fsdp/test_fsdp_desync.py::test_units_of_equal_sizes_in_another_order_raise"
ALONE = (
    "conformance/distributed/fsdp/test_fully_shard.py::test_ignored_parameters_stay_local",
    "conformance/distributed/fsdp/test_sharded_grad_scaler.py::test_inf_in_accumulated_backward_skips_step",
)
_LIMIT_S = 100.0
_WORKERS_LIMIT_S = 280.0  # each dead worker is replaced

pytestmark = pytest.mark.deadline(_LIMIT_S + 20)


def judged(name: str, folder: Path, *words: str) -> dict[str, Any]:
    """Judge a subject of `misbehaving` or of `folder` in a separate process, without workers. Return the report."""
    options = ("--tb=native", "--no-shrink", "--profile=quick", f"--subject={name}", f"--report={folder}")
    ended = run_pytest(
        *options, *(words or (MISUSED, OTHERS)), packages=[folder, written(folder / "subjects")]
    )
    log = ended.stdout + ended.stderr
    (folder / "log").write_text(log)
    file = folder / "report.json"
    assert file.is_file(), f"no report on {name}; judging ended with {ended.returncode}:\n{log[-3000:]}"
    return json.loads(file.read_text()) | {"exit code": ended.returncode}


def judged_by_workers(name: str, folder: Path, *words: str) -> dict[str, Any]:
    """Judge a subject that ends processes, in one worker unless `words` has another `-n`. Return the report."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "--profile=quick"]
    command += [f"--subject={name}", f"--report={folder}", *words]
    path = os.pathsep.join(map(str, (folder, written(folder / "subjects"), ROOT)))
    with (folder / "log").open("w") as log:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=log,
            stderr=log,
            timeout=_WORKERS_LIMIT_S,
            check=False,
        )
    file = folder / "report.json"
    assert file.is_file(), f"no report on {name}; judging ended with {ended.returncode}:\n{_log(folder)}"
    return json.loads(file.read_text()) | {"exit code": ended.returncode}


@pytest.fixture
def on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(written(tmp_path / "subjects")), str(ROOT)]))


def _log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-3000:]


def of(report: dict[str, Any], test: str) -> list[dict[str, Any]]:
    return [entry for entry in report["tests"] if entry["nodeid"].startswith(test)]


def not_run(report: dict[str, Any], file: str) -> set[str]:
    """Return the outcomes of the clauses of a test's file that no test ran of."""
    names = clauses_of_file(ROOT / file.partition("::")[0])
    return {entry["outcome"] for entry in report["not_run"] if entry["clause"] in names}


def assert_only_the_misused_is_red(report: dict[str, Any], outcome: str, says: str) -> None:
    misused, others = of(report, MISUSED), of(report, OTHERS)
    assert {entry["outcome"] for entry in misused} == {outcome}, misused
    assert all(says in entry["reason"] for entry in misused), misused[0]["reason"]
    assert [entry["outcome"] for entry in others] == ["passed"] * 5, others
    assert (report["verdict"], report["exit code"]) == ("red", pytest.ExitCode.TESTS_FAILED)


FAILED = {
    "sets_default_dtype": "left default dtype changed (torch.float32 before, torch.float64 after)",
    "sets_default_device": "left default device changed (cpu before, meta after)",
    "sets_grad_mode": "'grad mode': (True, False)",
    "sets_inference_mode": "'inference mode': (False, True)",
    "sets_deterministic": "left deterministic algorithms changed (0 before, 2 after)",
    "sets_threads": "left number of threads changed (",
    "sets_precision": "left float32 matmul precision changed (highest before, medium after)",
    "sets_anomaly_mode": "left anomaly mode changed ((False, True) before, (True, True) after)",
    "sets_warn_always": "left warn always changed (False before, True after)",
    "draws_numbers": "left torch's random generator changed (moved)",
    "seeds": "left torch's random generator changed (moved)",
    "changes_directory": "'the working directory': (",
    "changes_environment": "'the environment': ({",
    "changes_signals": "'signal handlers': ({'SIGTERM': <",
    "changes_stdout": "'the streams and hooks of sys': ({'stdout': ",
    "patches_torch": "'functions of torch': ({}, {'torch.nn.utils.clip_grad_norm_': <built-in function print>})",
    "patches_pytest": "'functions of torch': ({}, {'pytest.fail': ",
    "raises_interrupt": "the subject raised KeyboardInterrupt, which would have ended the run",
    "exits": "SystemExit: 0",
    "ends_pytest": "raised Exit",
    "raises_what_has_no_text": "raised Untold",
    "recurses": "maximum recursion depth exceeded",
    "prints": "raised ValueError",
    "exits_in_the_end": "raised ValueError",
    "leaks_a_thread": "'threads': ({}, {",
    "hogs_memory": "can't allocate memory",
}


@pytest.mark.parametrize("name", FAILED)
def test_failure_does_not_affect_other_tests(tmp_path: Path, name: str) -> None:
    assert_only_the_misused_is_red(judged(name, tmp_path), "failed", FAILED[name])


def test_missing_name_is_red_only_if_claimed(tmp_path: Path) -> None:
    claimed = judged("lacks_what_it_claims", tmp_path, CPU_ALONE, SCALER)
    lacking = of(claimed, SCALER)
    assert {(entry["outcome"], entry["reason"]) for entry in lacking} == {
        ("failed", "not provided, though claimed: amp.GradScaler")
    }
    assert {entry["outcome"] for entry in of(claimed, CPU_ALONE)} == {"passed"}
    unclaimed = judged("lacks_a_module", tmp_path, CPU_ALONE, SCALER, ON_RANKS, WRITING, TORCH_ALONE)
    assert {entry["outcome"] for entry in unclaimed["tests"]} == {"passed"}
    assert {entry["outcome"] for entry in of(unclaimed, CPU_ALONE)} == {"passed"}
    assert "not provided" in not_run(unclaimed, TORCH_ALONE)
    assert "not provided" in not_run(unclaimed, SCALER)
    assert (unclaimed["verdict"], unclaimed["exit code"]) == ("green", 0)


def test_extension_is_judged_only_if_claimed(tmp_path: Path) -> None:
    unclaimed = judged("lacks_what_it_claims", tmp_path, EXTENSION, CPU_ALONE)
    assert not of(unclaimed, EXTENSION)
    assert "not claimed" in not_run(unclaimed, EXTENSION)
    assert (unclaimed["verdict"], unclaimed["exit code"]) == ("green", 0)
    claimed = judged("conformance.selftests.claims_all", tmp_path, EXTENSION, CPU_ALONE)
    assert {entry["outcome"] for entry in of(claimed, EXTENSION)} == {"failed"}
    assert {entry["outcome"] for entry in of(claimed, CPU_ALONE)} == {"passed"}


def test_name_missing_on_ranks_is_not_provided(tmp_path: Path) -> None:
    node_ids = f"{ON_RANKS}[2-FSDP1 order train]", f"{WRITING}[fully_shard-2-8-eval]"
    report = judged("lacks_what_ranks_ask_for", tmp_path, *node_ids)
    lacking = (
        f"lacks_what_ranks_ask_for does not provide distributed.fsdp.{name}"
        for name in ("wrap.ModuleWrapPolicy", "fully_shard")
    )
    for test, reason in zip(node_ids, lacking, strict=True):
        [entry] = of(report, test)
        assert (entry["outcome"], entry["reason"]) == ("not provided", reason)


def test_name_is_judged_without_its_neighbours(tmp_path: Path) -> None:
    report = judged("has_names_alone", tmp_path, *ALONE)
    assert all(of(report, test) for test in ALONE)
    assert {entry["outcome"] for entry in report["tests"]} == {"passed"}


def test_failed_import_does_not_affect_other_modules(tmp_path: Path) -> None:
    report = judged("has_a_broken_module", tmp_path, SCALER, OTHERS)
    reported = "has_a_broken_module.amp cannot be imported (SystemExit: amp is not for this machine)"
    assert {entry["outcome"] for entry in of(report, SCALER)} == {"failed"}
    assert all(reported in entry["reason"] for entry in of(report, SCALER))
    assert [entry["outcome"] for entry in of(report, OTHERS)] == ["passed"] * 5


def test_hang_costs_its_clause_two_deadlines(tmp_path: Path) -> None:
    report = judged("sleeps", tmp_path, "--deadline=2", CPU_ALONE, OTHERS)
    outcomes = [entry["outcome"] for entry in of(report, CPU_ALONE)]
    assert sorted(outcomes) == ["hang"] * 2 + ["unavailable"] * (len(outcomes) - 2)
    for entry in of(report, CPU_ALONE):
        assert entry["reason"].startswith(
            "conformance.judge.errors.Hang: the test did not end within 2 s"
            if entry["outcome"] == "hang"
            else "not run: its clause was given up after "
        )
    assert [entry["outcome"] for entry in of(report, OTHERS)] == ["passed"] * 5


ENDS_IN_ACT = """
import ctypes, faulthandler, sys, threading, time

def act():
    if sys.argv[2] == "dies":
        ctypes.string_at(0)
    time.sleep(1.0)

threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
file = open(sys.argv[1], "w")
faulthandler.enable(file)
faulthandler.dump_traceback_later(0.2, file=file)
act()
"""


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_reported_stack_is_that_of_test(tmp_path: Path, end: str) -> None:
    notes = Notes(tmp_path)
    assert notes.last_stack("worker") == ""
    subprocess.run([sys.executable, "-c", ENDS_IN_ACT, notes.stack_file("worker"), end], check=False)
    stack = notes.last_stack("worker")
    assert "in act\n" in stack
    assert "threading.py" not in stack


def test_output_is_bounded_in_report_and_log(tmp_path: Path) -> None:
    report = judged("prints", tmp_path, MISUSED)
    assert max(len(json.dumps(test)) for test in report["tests"]) < 2_000
    assert (tmp_path / "log").stat().st_size < 1 << 19
    assert "characters, lastly:" in (tmp_path / "log").read_text(errors="replace")


REFUSED = {
    "fails_on_import": "(RuntimeError: not on this machine); fix what raises in `import fails_on_import`",
    "is_not_there.at_all": "(ModuleNotFoundError: No module named 'is_not_there'); expected impl, torch, or an",
    "dies_on_import": "cannot be loaded (importing it ended its process with exit code 0); let the import return",
    "hangs_on_import": "cannot be loaded (importing it did not end within 2 s); let the import return without waiting",
    "doubles_on_import": "forked the process and returned in both, so every importing program runs twice; let it start",
}


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.usefixtures("on_the_path")
def test_failed_subject_import_is_invalid_input(name: str) -> None:
    limit_s = 2.0 if name == "hangs_on_import" else trial.IMPORT_S
    with pytest.raises(trial.CannotBeJudged) as caught:
        trial.import_in_subprocess(name, limit_s=limit_s)
    assert REFUSED[name] in str(caught.value)


COMPLAINTS = {
    "prints_on_import": "prints 'hello, world' into the output of every program that imports it; let it warn",
    "forks_on_import": "forked a process, which has ended; let it start processes in a function that users call",
    "changes_signals_on_import": "changed the signal handlers (before, after): ({'SIGALRM': <",
}


@pytest.mark.parametrize("name", list(COMPLAINTS))
@pytest.mark.usefixtures("on_the_path")
def test_side_effects_of_import_are_reported(name: str) -> None:
    learned = trial.import_in_subprocess(name)
    assert "nn.utils.clip_grad_value_" in (learned.claims or ())
    [complaint] = learned.bad_input
    assert complaint.startswith(f"importing {name!r} ")
    assert COMPLAINTS[name] in complaint


def test_changed_signals_are_restored_for_judging(tmp_path: Path) -> None:
    report = judged("changes_signals_on_import", tmp_path, "--deadline=2", CPU_ALONE)
    assert {entry["outcome"] for entry in report["tests"]} == {"passed"}
    assert "signal handlers" in report["bad_input"][0]
    assert report["exit code"] == BAD_INPUT


def test_missing_device_is_distinguished_from_green(tmp_path: Path) -> None:
    report = judged("seeds", tmp_path, "--device=npu", OTHERS)
    assert {entry["outcome"] for entry in report["tests"]} == {"unavailable"}
    assert report["bad_input"][-1].startswith(
        "--device names npu, but this machine has none, and 5 tests did not run; run on a machine that has one"
    )
    assert (report["verdict"], report["exit code"]) == ("red", BAD_INPUT)


@pytest.mark.usefixtures("on_the_path")
def test_module_without_import_leaves_claims_unknown() -> None:
    assert trial.import_in_subprocess("has_a_hanging_module", limit_s=5.0).claims is None


# By test: what `dies_in_many_ways` does in it is to be killed, to exit as if all were well, to read where nothing is,
# to block signals, to stop its process, to hold Python's lock. The first is four, of which the last are given up.
LETHAL = {
    f"{VALUE}::test_long_gradients_among_short_ones": "crash",
    f"{TOTAL}::test_total_norm_of_nonfinite[cpu-True]": "crash",
    f"{TOTAL}::test_scales_by_the_given_norm[cpu-torch.float32]": "crash",
    f"{NORM}::test_deprecated_spelling[cpu-0.5-None-{{}}]": "hang",
    f"{NORM}::test_norm_types_on_the_edge[cpu-None]": "hang",
    "conformance/amp/test_autocast_mode.py::test_availability_matches_torch[3]": "hang",
}


@pytest.mark.deadline(_WORKERS_LIMIT_S + 20)
def test_dead_or_blocked_process_is_reported(tmp_path: Path) -> None:
    others = "conformance/amp/test_autocast_mode.py::test_bad_arguments"
    report = judged_by_workers("dies_in_many_ways", tmp_path, "-n", "2", "--deadline=6", *LETHAL, others)
    for test, expected in LETHAL.items():
        outcomes = [entry["outcome"] for entry in of(report, test)]
        assert outcomes.count(expected) == min(2, len(outcomes)) > 0, (test, outcomes)
        assert set(outcomes) <= {expected, "unavailable"}, (test, outcomes)
    assert {entry["outcome"] for entry in of(report, others)} == {"passed"}
    assert all(
        "in act" in entry["reason"]
        for entry in of(report, f"{TOTAL}::test_scales_by")
        if entry["outcome"] == "crash"
    )
    assert all(entry["clause"] for entry in report["tests"])
    assert all(entry["replay"] for entry in report["tests"] if entry["outcome"] in RED)
    assert (report["verdict"], report["exit code"]) == ("red", pytest.ExitCode.TESTS_FAILED)


@pytest.mark.deadline(_WORKERS_LIMIT_S + 20)
def test_exit_of_subject_does_not_change_verdict(tmp_path: Path) -> None:
    report = judged_by_workers("exits_in_the_end", tmp_path, CPU_ALONE)
    assert (report["verdict"], report["exit code"]) == ("red", pytest.ExitCode.TESTS_FAILED)


@pytest.mark.usefixtures("on_the_path")
def test_gate_starts_nothing_without_importable_subject(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "conformance.cli.gate", "--subject=dies_on_import", f"--out={tmp_path}"]
    ended = subprocess.run(command, cwd=ROOT, timeout=_LIMIT_S, check=False)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (ended.returncode, report["verdict"]) == (BAD_INPUT, "red")
    assert "ended its process with exit code 0" in report["bad_input"][0]
    assert report["speed"] == report["training"] == {}
