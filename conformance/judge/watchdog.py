"""A process beside one that runs tests, to kill it when a test has outlived its deadline and cannot be ended within.

A subject can block signals, take timers away, hold Python's lock or stop its process: only another process has a
remedy against all of them.
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
    """Watches this process until it ends. What it has to kill for is noted in the file of faults before."""

    def __init__(self, incidents_file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(incidents_file)], stdin=subprocess.PIPE, bufsize=0
        )

    def expect_end(self, nodeid: str, seconds: float) -> None:
        self._tell([seconds, nodeid, f"killed: it did not end within {seconds:g} s, nor when told to"])

    def rest(self) -> None:
        self._tell([None, "", ""])

    def dismiss(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._process.wait()

    @property
    def _stdin(self) -> subprocess.IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _tell(self, words: list[object]) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # a subject may end it, or close its pipe
            self._stdin.write(json.dumps(words).encode() + b"\n")


def watch(incidents_file: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who are watched; their end is our own
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
