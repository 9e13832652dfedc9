"""Python programs that tests run in processes of their own, and the processes that those leave."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The server of forks imports this module, so that no fork has to import these.
import conformance.plugin
import conformance.simulator.lanes
import conformance.simulator.script
import conformance.strength.faults.handmade  # noqa: F401 telling the names of torch needs it
from conformance.judge.sandbox.marked_processes import marked_processes
from conformance.ranks.handle import fork_server, keep_fork_server, shared_fork_server
from conformance.ranks.process import find_hosts_in_files

ROOT = Path(__file__).parents[2]
# The simulator is built first if it is not in the cache.
LIMIT_S = 500.0


def run_python(*words: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `-m`, `-c` or a script in a fork of a process that has imported torch, to save time.

    It finds the repository unless PYTHONPATH is passed.
    """
    arguments = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("output", "errors")]
        settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        context = fork_server()
        process = context.Process(target=_run, args=(arguments, cwd, settings, files, shared_fork_server()))
        process.start()
        try:
            process.join(LIMIT_S)
            texts = [file.read_text(errors="replace") if file.exists() else "" for file in files]
            if process.exitcode is None:
                raise TimeoutError(f"{arguments} did not end in {LIMIT_S:g} s: {''.join(texts)}")
            return subprocess.CompletedProcess(arguments, process.exitcode, *texts)
        finally:
            # The test's deadline may have ended the wait.
            if process.is_alive():
                assert process.pid is not None
                with contextlib.suppress(ProcessLookupError):  # no group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _run(
    arguments: list[str], cwd: Path, environment: dict[str, str], files: list[Path], server: dict[str, Any]
) -> None:
    os.setsid()
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    find_hosts_in_files()
    keep_fork_server(server)
    sys.path[:0] = [str(cwd), *environment["PYTHONPATH"].split(os.pathsep)]
    match arguments:
        case ["-m", module, *_]:
            sys.argv = arguments[1:]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", source, *_]:
            sys.argv = ["-c", *arguments[2:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(source, main.__dict__)
        case [script, *_]:
            sys.argv = arguments
            runpy.run_path(script, run_name="__main__")


def run_fresh_python(
    *words: object, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, for programs that depend on what is imported or on variables of its start."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def run_pytest(
    *words: object, cwd: Path = ROOT, packages: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run pytest with one process, which also finds the packages in folders."""
    path = os.pathsep.join(map(str, (*packages, ROOT)))
    options = ("-q", "-n", "0", "-p", "no:cacheprovider")
    return run_python("-m", "pytest", *options, *words, cwd=cwd, PYTHONPATH=path)


def left_processes(mark: str) -> list[int]:
    """Return the processes with a mark (NAME=value) in their environment that do not end within 20 seconds."""
    end = time.monotonic() + 20
    while (left := marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return left
