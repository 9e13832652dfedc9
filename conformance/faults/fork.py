"""The inside of a worker: it has the suite collected, and forks for each task. A fork is an ordinary run of pytest.

Why forks: to import torch and to collect takes seconds, what kills a fault mostly milliseconds. No operator runs
before the fork, because the threads that it starts would be missing in it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch._dynamo  # noqa: F401 the first step of an optimizer imports it, which takes as long as a fault lives

from conformance.faults.order import Task, in_order, starts_ranks
from conformance.judge.clauses import HERE, all_clauses, clause_of
from conformance.judge.deadlines import Deadlines
from conformance.judge.judgement import RED
from conformance.judge.library import load_library
from conformance.judge.notes import Notes
from conformance.judge.results import WorkerRecorder
from conformance.ranks.handle import keep_fork_server, start_fork_server

LOG = "log"
_SILENCE_S = 300.0  # each test has its own deadline and is told of; this is for what hangs outside of one
# Of pytest: tasks are shared out and told in another way, and the handlers of logging cost as much as a short test.
_UNUSED_PLUGINS = ("xdist", "cacheprovider", "logging")
_READ_BYTES = 65_536
_USUAL_CODES = (0, 1)  # of pytest: all passed, some failed


@dataclass(frozen=True)
class Ending:
    """What became of a task: the first test that was red, if one was."""

    how: str = ""  # an outcome of `RED`
    nodeid: str = ""
    clause: str = ""
    asked: int = 0  # tests that could run on this machine
    seconds: float = 0.0


def serve(
    tasks: connection.Connection, package: str, profile: str, clauses: Collection[str], folder: Path
) -> None:
    """Life of a worker: an `Ending` for each `Task`, or a sentence that says why there is none."""
    os.setsid()  # so that it is killed with all that it started, and Ctrl-C is its parent's alone
    os.environ.pop("PYTEST_ADDOPTS", None)
    with (folder / LOG).open("w") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    plugins = [word for name in _UNUSED_PLUGINS for word in ("-p", f"no:{name}")]
    words = ["-q", "--tb=native", "--no-shrink", f"--subject={package}", f"--profile={profile}"]
    try:
        pytest.main([*plugins, *words, *test_files(clauses)], plugins=[_Forking(tasks, folder)])
    finally:
        sys.stdout.flush()  # what pytest has said of an error lies there
        os._exit(0)  # what a fork would clean up is its worker's


def test_files(clauses: Collection[str]) -> list[str]:
    """What any subject is asked: by these clauses (all, if none is named), and about its names and signatures."""
    areas = {all_clauses()[clause_id].area for clause_id in clauses or all_clauses()}
    folders = {HERE, *(HERE.joinpath(*area.split(".")).parent for area in areas)}
    return [str(file) for folder in sorted(folders) for file in sorted(folder.glob("test_*.py"))]


class _Forking:
    """A pytest plugin: where tests would run it forks for each task, and in the fork it lets them run."""

    def __init__(self, tasks: connection.Connection, folder: Path) -> None:
        self._tasks, self._folder = tasks, folder
        self._worker: TextIO | None = None  # in a fork, whom it tells
        self._has_fork_server = False  # which ranks come from; it costs as much as the worker itself
        self._kept: list[object] = []  # in a fork, what would end something of the worker's if it were let go

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:  # in collection: pytest's own loop says so and ends
            return None
        clauses = {item.nodeid: clause_of(item) for item in session.items}
        gc.freeze()
        with contextlib.suppress(EOFError, ConnectionError):  # nobody asks any more
            while True:
                task = self._tasks.recv()
                began = time.monotonic()
                if not self._has_fork_server and any(map(starts_ranks, in_order(session.items, task))):
                    self._has_fork_server = True
                    start_fork_server()
                notes = Notes(self._folder / str(time.monotonic_ns()))
                notes.folder.mkdir()
                reader, writer = os.pipe()
                fork = os.fork()
                if fork == 0:
                    os.close(reader)
                    self._worker = open(writer, "w", buffering=1)  # noqa: SIM115 open for life
                    self._take_up(task, session, notes)
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

    def _take_up(self, task: Task, session: pytest.Session, notes: Notes) -> None:
        """Make this run, in a fork, one about the task."""
        if self._has_fork_server:
            keep_fork_server()
        load_library(task.spec)
        option = session.config.option
        option.subject, option.maxfail = task.spec, 1
        session.items[:] = in_order(session.items, task)
        if not session.items and not task.may_be_empty:
            raise LookupError(
                f"no test asks about any of {sorted(task.clauses)}, or is called {task.first!r}"
            )
        deadlines = Deadlines(session.config, notes)
        deadlines.pytest_sessionstart(session)
        deadlines.pytest_collection_modifyitems(session.items)
        self._replace(session.config, "conformance-deadlines", deadlines)
        self._replace(session.config, "conformance-worker-recorder", WorkerRecorder(notes))

    def _replace(self, config: pytest.Config, name: str, plugin: object) -> None:
        self._kept.append(config.pluginmanager.unregister(name=name))
        config.pluginmanager.register(plugin, name)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell({"running": nodeid})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._worker is None:
            return
        recorder: Any = session.config.pluginmanager.get_plugin("conformance-recorder")
        tests = recorder.as_dict()["tests"]
        red = next((test for test in tests if test["outcome"] in RED), {"outcome": "", "nodeid": ""})
        asked = sum(test["outcome"] not in ("unavailable", "not claimed") for test in tests)
        code = int(session.exitstatus)
        self._tell({"code": code, "how": red["outcome"], "nodeid": red["nodeid"], "asked": asked})

    def _tell(self, entry: dict[str, Any]) -> None:
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
            noted = [incident.outcome for incident in notes.incidents()]
            return Ending("hang" if hangs else noted[-1] if noted else "crash", reported.get("running", ""))
        if reported["code"] not in _USUAL_CODES:
            raise RuntimeError(f"pytest ended with code {reported['code']}")
        return Ending(reported["how"], reported["nodeid"], asked=reported["asked"])

    def _text_of(self, reader: int) -> tuple[str, bool]:
        """All that the fork tells, and whether it had to be given up."""
        text = bytearray()
        with open(reader, "rb", buffering=0) as pipe:
            while ready := connection.wait([pipe, self._tasks], _SILENCE_S):
                if self._tasks in ready:  # nothing is sent before the answer: nobody waits for it any more
                    os.killpg(0, signal.SIGKILL)
                piece = pipe.read(_READ_BYTES)
                if not piece:
                    return text.decode(), False
                text += piece
        return text.decode(), True
