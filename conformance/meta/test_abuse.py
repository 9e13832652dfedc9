"""What subjects come to that hang, die, leak, print, patch or change what is not theirs, and what others notice of it.

Each lies in a folder of its own under `abuse/`, and is torch but for one thing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ABUSE = Path(__file__).parent / "abuse"
VALUE = "conformance/nn/utils/test_clip_grad_value.py"
NORM = "conformance/nn/utils/test_clip_grad.py"
ABUSED = f"{VALUE}::test_clamping_foreach"  # six tests that call `clip_grad_value_`
OTHERS = f"{NORM}::test_norm_types_on_the_edge"  # five that do not
# Imported once for all subjects: each is judged in a fork.
_PRELOAD = ["torch", "hypothesis", "pytest", "conformance.plugin", "conformance.plants"]
_LIMIT_S = 100.0

pytestmark = pytest.mark.deadline(_LIMIT_S + 20)


def judged(name: str, folder: Path, *words: str) -> dict[str, Any]:
    """The report on a subject, from a process of its own that runs the tests itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    process = context.Process(target=_judge, args=(name, folder, words))
    process.start()
    process.join(_LIMIT_S)
    ended = not process.is_alive()
    process.kill()
    process.join()
    assert ended, f"judging {name} did not end:\n{_log(folder)}"
    file = folder / "report.json"
    assert file.is_file(), f"no report on {name}; judging ended with {process.exitcode}:\n{_log(folder)}"
    return json.loads(file.read_text()) | {"exit code": process.exitcode}


def _judge(name: str, folder: Path, words: tuple[str, ...]) -> None:
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.path.insert(0, str(ABUSE))
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--no-shrink", "--profile=quick"]
    sys.exit(pytest.main([*options, f"--subject={name}", f"--report={folder}", *(words or (ABUSED, OTHERS))]))


def judged_by_workers(name: str, folder: Path, *words: str) -> dict[str, Any]:
    """The report on a subject that ends processes: workers run the tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "--profile=quick"]
    command += [f"--subject={name}", f"--report={folder}", *words]
    path = os.pathsep.join([str(ABUSE), str(ROOT)])
    with (folder / "log").open("w") as log:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=log,
            stderr=log,
            timeout=_LIMIT_S,
            check=False,
        )
    file = folder / "report.json"
    assert file.is_file(), f"no report on {name}; judging ended with {ended.returncode}:\n{_log(folder)}"
    return json.loads(file.read_text()) | {"exit code": ended.returncode}


def _log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-3000:]


def of(report: dict[str, Any], test: str) -> list[dict[str, Any]]:
    return [entry for entry in report["tests"] if entry["nodeid"].startswith(test)]


def assert_only_the_abused_is_red(report: dict[str, Any], outcome: str, says: str) -> None:
    abused, others = of(report, ABUSED), of(report, OTHERS)
    assert {entry["outcome"] for entry in abused} == {outcome}, abused
    assert all(says in entry["reason"] for entry in abused), abused[0]["reason"]
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
    "raises_interrupt": "KeyboardInterrupt: raised, which would have ended the whole run",
    "exits": "SystemExit: 0",
    "ends_pytest": "raised Exit",
    "raises_what_has_no_text": "raised Untold",
    "recurses": "maximum recursion depth exceeded",
    "prints": "raised ValueError",
    "exits_in_the_end": "raised ValueError",
    "leaks_a_thread": "'threads': ({}, {",
    "hogs_memory": "can't allocate memory",
}


@pytest.mark.parametrize("name", list(FAILED))
def test_what_fails_fails_alone(tmp_path: Path, name: str) -> None:
    assert_only_the_abused_is_red(judged(name, tmp_path), "failed", FAILED[name])


def test_a_name_that_is_lacking_is_red_only_if_claimed(tmp_path: Path) -> None:
    asked = (ABUSED, "conformance/amp/test_grad_scaler_construct.py")
    claimed = judged("lacks_what_it_claims", tmp_path, *asked)
    lacking = of(claimed, asked[1])
    assert {(entry["outcome"], entry["reason"]) for entry in lacking} == {
        ("failed", "not provided, though claimed: amp.GradScaler")
    }
    assert {entry["outcome"] for entry in of(claimed, ABUSED)} == {"passed"}
    unclaimed = judged("lacks_a_module", tmp_path, *asked)
    assert {entry["outcome"] for entry in of(unclaimed, asked[1])} == {"not provided"}
    assert (unclaimed["verdict"], unclaimed["exit code"]) == ("green", 0)
