"""A process that kills a test process if a test exceeds its deadline and cannot be ended from inside.

A subject can block signals, remove timers, hold Python's lock or stop its process. Only another process can end all of
these.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_READ_BYTES = 1 << 16


class Watchdog:
    """Watchdog of this process. Before it kills the process, it writes the incident to a file."""

    def __init__(self, incidents_file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(incidents_file)], stdin=subprocess.PIPE, bufsize=0
        )

    def expect_end(self, nodeid: str, seconds: float) -> None:
        self._send([seconds, nodeid, f"killed: it did not end within {seconds:g} s, nor by an exception"])

    def rest(self) -> None:
        self._send([None, "", ""])

    def dismiss(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._process.wait()

    @property
    def _stdin(self) -> subprocess.IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _send(self, message: list[object]) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # a subject may end it or close its pipe
            self._stdin.write(json.dumps(message).encode() + b"\n")


def watch(incidents_file: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends with the watched process instead
    watched, reported = os.getppid(), [None, "", ""]
    while select.select([0], [], [], reported[0])[0]:
        lines = os.read(0, _READ_BYTES).splitlines()
        if not lines:
            return
        reported = json.loads(lines[-1])
    _, nodeid, reason = reported
    with open(incidents_file, "a") as file:
        file.write(json.dumps({"nodeid": nodeid, "outcome": "hang", "reason": reason}) + "\n")
    if os.getppid() == watched:
        os.kill(watched, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.argv[1])
