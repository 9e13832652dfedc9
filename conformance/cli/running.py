"""Execution of a command until it ends, exceeds its deadline or is stopped by the user, with all of its processes.

The first Ctrl-C or SIGTERM only sets a flag, so that results can still be written. The second raises as usual.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from conformance.judge.sandbox.marked_processes import marked_processes

_POLL_S = 0.2
_GRACE_S = 3.0  # time for a stopped command to write its results
# Environment variable of every process that a command starts. A process group would not include new sessions.
_MARK = "TANDEM_COMMAND"
STOPPED = "stopped by the user"


class Stop:
    """A flag that is set when the user asks for an end by Ctrl-C or SIGTERM."""

    def __init__(self) -> None:
        self.is_requested = False

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        def note(signum: int, frame: object) -> None:
            self.is_requested = True
            for number, handler in previous.items():
                signal.signal(number, handler)

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def run(
    command: Sequence[str], log: Path, deadline_s: float, stop: Stop, watch: Callable[[], Any] = lambda: None
) -> tuple[str, int]:
    """Run a command and return why it was stopped, or an empty string if it ended by itself, and its exit code."""
    end = time.monotonic() + deadline_s
    mark = {_MARK: uuid.uuid4().hex}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | mark
        )
        try:
            while process.poll() is None and not stop.is_requested:
                if time.monotonic() > end:
                    return (
                        f"{shlex.join(['python', *command[1:4]])} … did not end within {deadline_s:g} s",
                        -1,
                    )
                time.sleep(_POLL_S)
                watch()
            if stop.is_requested:
                _ask_to_end(process)
            watch()
            return (STOPPED, -1) if stop.is_requested else ("", process.returncode)
        finally:
            _end(process, f"{_MARK}={mark[_MARK]}")


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(_GRACE_S)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for left in marked_processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
