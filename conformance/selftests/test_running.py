"""A command runs to its end, to its deadline, or until the user stops it. None of its processes survives it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from conformance.cli.running import STOPPED, Stop, run
from conformance.selftests.processes import left_processes

pytestmark = pytest.mark.deadline(60)

LEAVES_A_PROCESS = """
import subprocess, sys, time
subprocess.Popen(["sleep", "3600"], start_new_session=True)
print("up", flush=True)
if "wait" in sys.argv:
    time.sleep(3600)
"""
TELLS_WHAT_IT_KNOWS = """
import time
print("up", flush=True)
try:
    time.sleep(3600)
except KeyboardInterrupt:
    print("this is known")
"""
IGNORES_EVERYTHING = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
print("up", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an environment mark of all processes that a test starts."""
    monkeypatch.setenv("TANDEM_MARK", uuid.uuid4().hex)
    return f"TANDEM_MARK={os.environ['TANDEM_MARK']}"


def test_finished_command_leaves_no_process(tmp_path: Path, mark: str) -> None:
    log = tmp_path / "log"
    assert run([sys.executable, "-c", LEAVES_A_PROCESS], log, 30.0, Stop()) == ("", 0)
    assert (log.read_text(), left_processes(mark)) == ("up\n", [])


def test_timed_out_command_leaves_no_process(tmp_path: Path, mark: str) -> None:
    why, code = run([sys.executable, "-c", LEAVES_A_PROCESS, "wait"], tmp_path / "log", 1.0, Stop())
    assert "did not end within 1 s" in why
    assert (code, left_processes(mark)) == (-1, [])


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("source", "last"), [(TELLS_WHAT_IT_KNOWS, "this is known\n"), (IGNORES_EVERYTHING, "up\n")]
)
def test_stopped_command_may_report_results(
    tmp_path: Path, mark: str, blow: signal.Signals, source: str, last: str
) -> None:
    log, stop = tmp_path / "log", Stop()

    def strike() -> None:
        while not (log.is_file() and log.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), blow)

    striking = threading.Thread(target=strike)
    with stop.listening():
        striking.start()
        assert run([sys.executable, "-c", source], log, 50.0, stop) == (STOPPED, -1)
    striking.join()
    assert log.read_text().endswith(last)
    assert left_processes(mark) == []


def test_second_interrupt_ends_command_at_once() -> None:
    stop = Stop()
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
        assert stop.is_requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
