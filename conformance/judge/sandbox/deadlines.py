"""Deadlines of tests, and the end of tests that exceed theirs or end their process.

A test's deadline is the argument of its `deadline` mark, else the profile's default. At the deadline an exception is
raised in the test. If that does not end it, another process kills it a little later, so one test costs a bounded time.
Two rules bound the cost of a subject that hangs everywhere:
    each test of an area that hangs halves the deadlines of the area's other tests, down to `_LEAST_S`;
    a clause is given up once `_INCIDENTS_A_CLAUSE` of its tests have hung or ended their process. Its other tests do
    not run, and report that.
An area is a file of clauses, for example `amp.grad_scaler`. Other areas keep their deadlines.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Generator, Iterable

import pytest

from conformance.judge.clauses import all_clauses, clause_of
from conformance.judge.errors import Hang, StoppedByUser, describe, raise_stopped_by_user
from conformance.judge.judgement import unavailable
from conformance.judge.sandbox import trial
from conformance.judge.sandbox.global_state import put_back, read
from conformance.judge.sandbox.notes import Notes
from conformance.judge.sandbox.process_state import PROCESS, lasting_threads
from conformance.judge.sandbox.watchdog import Watchdog

_PROFILES_S = {"smoke": 60.0, "quick": 120.0, "full": 300.0, "deep": 3600.0}
_LEAST_S = 10.0
_MOST_GRACE_S = 20.0  # time between the exception and the kill
_INCIDENTS_A_CLAUSE = 2
# Workers may be restarted for every clause, but not without a bound.
MOST_RESTARTS = _INCIDENTS_A_CLAUSE * len(all_clauses())


class EndedTheRun(AssertionError):
    """Raised instead of an exception of the subject that would make pytest stop the run."""


def shortened_s(base_s: float, hangs: int) -> float:
    """Return the deadline of a test after `hangs` tests of its area have hung."""
    return min(base_s, max(_LEAST_S, base_s / 2**hangs))


class Deadlines:
    """A pytest plugin that enforces deadlines, in every process that runs tests."""

    def __init__(self, config: pytest.Config, notes: Notes) -> None:
        self._notes = notes
        self._base_s: float = config.option.deadline or _PROFILES_S[config.option.profile]
        self._clauses: dict[str, str] = {}  # clause ids by test id
        self._watchdog = Watchdog(notes.incidents_file)
        self._stacks = _stacks_file(config, notes)
        self._threads = set(lasting_threads())
        self._session: pytest.Session | None = None
        signal.signal(signal.SIGINT, raise_stopped_by_user)

    @contextlib.contextmanager
    def for_import(self) -> Generator[None]:
        """Context manager that enforces the deadline of importing the subject."""
        self._watchdog.expect_end("", trial.IMPORT_S + _MOST_GRACE_S)
        try:
            with _alarm(trial.IMPORT_S, f"importing the subject did not end within {trial.IMPORT_S:g} s"):
                yield
        finally:
            self._watchdog.rest()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._clauses = {item.nodeid: clause_of(item) for item in items}
        self._notes.keep("clauses", self._clauses)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._watchdog.expect_end(item.nodeid, self._kill_s(item))
        try:
            return (yield)
        finally:
            self._watchdog.rest()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if why := self._given_up(item):
            unavailable(why)

    # `trylast`: inside pytest's capture, which changes sys.stdout as well.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        with self._deadline(item), _fail_if_process_changed(bool(clause_of(item))):
            try:
                return (yield)
            except StoppedByUser:
                raise
            except (KeyboardInterrupt, pytest.exit.Exception) as error:
                raise EndedTheRun(
                    f"the subject raised {describe(error)}, which would have ended the run"
                ) from error

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        if hasattr(session.config, "workerinput"):
            # Not earlier, because pytest enables faulthandler with another file.
            faulthandler.enable(self._stacks)

    @pytest.hookimpl(wrapper=True)
    def pytest_unconfigure(self) -> Generator[None]:
        yield
        self._watchdog.dismiss()
        if self._session is not None and set(lasting_threads()) - self._threads:
            # The interpreter would wait for the threads that are left.
            sys.stdout.flush()
            os._exit(int(self._session.exitstatus))

    @contextlib.contextmanager
    def _deadline(self, item: pytest.Item) -> Generator[None]:
        """Context manager that raises `Hang` at the test's deadline.

        If Python cannot run then, the stacks are written before the process is killed.
        """
        seconds = self._limit_s(item)
        reported = f"the test did not end within {seconds:g} s"
        if seconds < self._own_limit_s(item):
            reported += f" (its deadline of {self._own_limit_s(item):g} s was shortened because tests of its area hung)"
        faulthandler.dump_traceback_later((seconds + self._kill_s(item)) / 2, file=self._stacks)
        try:
            with _alarm(seconds, reported):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _own_limit_s(self, item: pytest.Item) -> float:
        marker = item.get_closest_marker("deadline")
        return marker.args[0] if marker else self._base_s

    def _limit_s(self, item: pytest.Item) -> float:
        """Return the deadline of a test, shortened if tests of its area have hung. Selftests have no area."""
        area = _area(clause_of(item))
        hangs = sum(
            incident.outcome == "hang" and _area(self._clauses.get(incident.nodeid, "")) == area
            for incident in self._notes.incidents()
        )
        return shortened_s(self._own_limit_s(item), hangs if area else 0)

    def _kill_s(self, item: pytest.Item) -> float:
        return self._limit_s(item) + min(self._limit_s(item), _MOST_GRACE_S)

    def _given_up(self, item: pytest.Item) -> str:
        clause = clause_of(item)
        incidents = [
            incident
            for incident in self._notes.incidents()
            if clause and self._clauses.get(incident.nodeid) == clause and incident.nodeid != item.nodeid
        ]
        if len(incidents) < _INCIDENTS_A_CLAUSE:
            return ""
        ends = _join(f"{incident.nodeid.rpartition('::')[2]} ({incident.outcome})" for incident in incidents)
        return f"not run: its clause was given up after {ends}"


@contextlib.contextmanager
def _alarm(seconds: float, reported: str) -> Generator[None]:
    def stop(signum: int, frame: object) -> None:
        raise Hang(reported)

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _join(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _area(clause: str) -> str:
    return all_clauses()[clause].area if clause in all_clauses() else ""


def _stacks_file(config: pytest.Config, notes: Notes) -> int:
    """Return the descriptor to write stacks to: a worker's file in the run's notes, or the terminal."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is None:
        return os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)  # the stream before pytest's capture
    return os.open(notes.stack_file(worker), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@contextlib.contextmanager
def _fail_if_process_changed(is_judging: bool) -> Generator[None]:
    """Context manager that restores the state of the process and fails the test if it has changed.

    Selftests are left out, because a fixture restores their state later.
    """
    before = read(PROCESS) if is_judging else {}
    changed = {}
    try:
        yield
    finally:
        if is_judging:
            changed = put_back(PROCESS, before)
    assert not changed, f"the process was left changed (before, after): {changed}"
