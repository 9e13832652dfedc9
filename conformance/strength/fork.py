"""The process of a worker. It collects the suite and forks for each task. A fork is an ordinary run of pytest.

Importing torch and collecting take seconds, while killing a fault usually takes milliseconds, which is why it forks. No
operator runs before the fork, because the threads that it starts would be missing in the fork.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch._dynamo  # noqa: F401 slow import, else done by every fork's first optimizer step

from conformance.judge.clauses import HERE, all_clauses, clause_of
from conformance.judge.judgement import RED
from conformance.judge.library import load_library
from conformance.judge.results import WorkerRecorder
from conformance.judge.sandbox.deadlines import Deadlines
from conformance.judge.sandbox.notes import Notes
from conformance.ranks.handle import keep_fork_server
from conformance.strength.faults import handmade  # noqa: F401 else imported by every fork
from conformance.strength.order import Task, ordered_tests

LOG = "log"
_SILENCE_S = 300.0  # limit for hangs outside of tests, which have deadlines
# Plugins of pytest that are switched off. Tasks are distributed and reported in another way, and the handlers of
# logging cost as much as a short test.
_UNUSED_PLUGINS = ("xdist", "cacheprovider", "logging")
_READ_BYTES = 65_536
_USUAL_CODES = (0, 1)  # exit codes of pytest: all passed, some failed


@dataclass(frozen=True)
class Ending:
    """The result of a task: the first red test, or none."""

    how: str = ""  # member of `RED`
    nodeid: str = ""
    clause: str = ""
    tests_run: int = 0  # number of tests that could run on this machine
    seconds: float = 0.0

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row of results."""
        return {"how": self.how, "nodeid": self.nodeid, "clause": self.clause, "seconds": self.seconds}


def serve(
    tasks: connection.Connection,
    package: str,
    profile: str,
    clauses: Collection[str],
    folder: Path,
    environment: dict[str, str],
    server: Mapping[str, Any],
) -> None:
    """Run a worker, which sends an `Ending` for each `Task`, or a text that says why there is none."""
    # The parent kills the session with all of its processes, and only the parent gets Ctrl-C.
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.environ.pop("PYTEST_ADDOPTS", None)
    keep_fork_server(server)
    with (folder / LOG).open("w") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    plugins = [word for name in _UNUSED_PLUGINS for word in ("-p", f"no:{name}")]
    words = ["-q", "--tb=native", "--no-shrink", f"--subject={package}", f"--profile={profile}"]
    try:
        pytest.main([*plugins, *words, *files_to_collect(clauses)], plugins=[_Forking(tasks, folder)])
    finally:
        sys.stdout.flush()  # errors of pytest
        # A fork must not clean up what belongs to its worker.
        os._exit(0)


def files_to_collect(clauses: Collection[str]) -> list[str]:
    """Return the test files of the clauses' areas, or of all areas, and those about names and signatures."""
    areas = {all_clauses()[clause_id].area for clause_id in clauses or all_clauses()}
    folders = {HERE, *(HERE.joinpath(*area.split(".")).parent for area in areas)}
    return [str(file) for folder in sorted(folders) for file in sorted(folder.glob("test_*.py"))]


class _Forking:
    """A pytest plugin that forks for each task instead of running tests. In the fork, the tests run."""

    def __init__(self, tasks: connection.Connection, folder: Path) -> None:
        self._tasks, self._folder = tasks, folder
        self._worker: TextIO | None = None  # the pipe to the worker, if this is a fork
        # In a fork, objects of the worker whose deletion would end processes of the worker.
        self._kept_alive: list[object] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:  # failed collection, reported by pytest's own loop
            return None
        clauses = {item.nodeid: clause_of(item) for item in session.items}
        gc.freeze()
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
            while True:
                task = self._tasks.recv()
                began = time.monotonic()
                notes = Notes(self._folder / str(time.monotonic_ns()))
                notes.folder.mkdir()
                reader, writer = os.pipe()
                fork = os.fork()
                if fork == 0:
                    os.close(reader)
                    self._worker = open(writer, "w", buffering=1)  # noqa: SIM115 open for life
                    self._prepare(task, session, notes)
                    return None
                os.close(writer)
                try:
                    ending = self._ending_of(fork, reader, notes)
                    seconds = round(time.monotonic() - began, 2)
                    clause = clauses.get(ending.nodeid, "")
                    self._tasks.send(replace(ending, clause=clause, seconds=seconds))
                except RuntimeError as error:
                    self._tasks.send(str(error))
        return True

    def _prepare(self, task: Task, session: pytest.Session, notes: Notes) -> None:
        """Prepare the session of a fork for the task."""
        load_library(task.spec)
        option = session.config.option
        option.subject, option.maxfail = task.spec, 1
        session.items[:] = ordered_tests(session.items, task)
        if not session.items and not task.may_be_empty:
            raise LookupError(f"no test has a clause of {sorted(task.clauses)} or the name {task.first!r}")
        deadlines = Deadlines(session.config, notes)
        deadlines.pytest_sessionstart(session)
        deadlines.pytest_collection_modifyitems(session.items)
        self._replace(session.config, "conformance-deadlines", deadlines)
        self._replace(session.config, "conformance-worker-recorder", WorkerRecorder(notes))

    def _replace(self, config: pytest.Config, name: str, plugin: object) -> None:
        self._kept_alive.append(config.pluginmanager.unregister(name=name))
        config.pluginmanager.register(plugin, name)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send({"running": nodeid})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._worker is None:
            return
        recorder: Any = session.config.pluginmanager.get_plugin("conformance-recorder")
        # The heading of a complete report takes longer than most tasks.
        tests = recorder.tests_as_dicts()
        red = next((test for test in tests if test["outcome"] in RED), {"outcome": "", "nodeid": ""})
        tests_run = sum(test["outcome"] not in ("unavailable", "not claimed") for test in tests)
        code = int(session.exitstatus)
        self._send({"code": code, "how": red["outcome"], "nodeid": red["nodeid"], "tests_run": tests_run})

    def _send(self, entry: dict[str, Any]) -> None:
        assert self._worker is not None
        self._worker.write(json.dumps(entry) + "\n")

    def _ending_of(self, fork: int, reader: int, notes: Notes) -> Ending:
        text, hangs = self._text_of(reader)
        if hangs:
            os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        reported: dict[str, Any] = {}
        for line in text.splitlines():
            reported |= json.loads(line)
        if hangs or "code" not in reported:
            outcomes = [incident.outcome for incident in notes.incidents()]
            how = "hang" if hangs else outcomes[-1] if outcomes else "crash"
            return Ending(how, reported.get("running", ""))
        if reported["code"] not in _USUAL_CODES:
            raise RuntimeError(f"pytest ended with code {reported['code']}")
        return Ending(reported["how"], reported["nodeid"], tests_run=reported["tests_run"])

    def _text_of(self, reader: int) -> tuple[str, bool]:
        """Return the text that the fork sends, and whether it hangs."""
        text = bytearray()
        with open(reader, "rb", buffering=0) as pipe:
            while ready := connection.wait([pipe, self._tasks], _SILENCE_S):
                # The parent sends nothing before the answer, so its end of the pipe must be closed.
                if self._tasks in ready:
                    os.killpg(0, signal.SIGKILL)
                piece = pipe.read(_READ_BYTES)
                if not piece:
                    return text.decode(), False
                text += piece
        return text.decode(), True
