"""Runs of scripts on the simulated accelerator."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

from conformance.ranks.handle import fork_server
from conformance.selftests.processes import LIMIT_S
from conformance.simulator.__main__ import main


def simulate(*words: object, cwd: Path) -> tuple[int, str]:
    """Run `python -m conformance.simulator` in a fork of a process that has imported torch, to save time.

    Return the exit status, and the output followed by the errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("output", "errors")]
        arguments = [str(word) for word in words]
        process = fork_server().Process(target=_run_main, args=(arguments, cwd, files))
        process.start()
        try:
            process.join(LIMIT_S)
            if process.exitcode is None:
                raise TimeoutError(f"{arguments} did not end in {LIMIT_S:g} s: {_text_of(files)}")
            return process.exitcode, _text_of(files)
        finally:
            # The test's deadline may have ended the wait.
            if process.is_alive():
                assert process.pid is not None
                with contextlib.suppress(ProcessLookupError):  # no group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def simulate_source(source: str, *words: object, cwd: Path) -> tuple[int, str]:
    """Write `script.py` and simulate it."""
    (cwd / "script.py").write_text(textwrap.dedent(source))
    return simulate("script.py", *words, cwd=cwd)


def _text_of(files: list[Path]) -> str:
    return "".join(file.read_text() for file in files if file.exists())


def _run_main(arguments: list[str], cwd: Path, files: list[Path]) -> None:
    os.setsid()
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    sys.exit(main(arguments))
