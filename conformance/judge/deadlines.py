"""How long a test may take, and what is done to one that takes longer, or that takes its process along.

A test's deadline is what its `deadline` mark says, else the profile's. At its deadline an exception is raised in it;
what does not end by that is killed a little later by a process beside it. So one test costs a bounded time, and so
that a subject that hangs everywhere does not cost the sum of all deadlines:
    each test of an area that hangs halves the deadlines of the area's other tests, down to `_LEAST_S`;
    a clause is given up once `_INCIDENTS_A_CLAUSE` of its tests have hung or ended their process: its other tests are
    not run, and say so.
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

from conformance.judge import trial
from conformance.judge.clauses import all_clauses, clause_of
from conformance.judge.errors import Hang, StoppedByHand, describe, stop_by_hand
from conformance.judge.global_state import put_back, read
from conformance.judge.judgement import unavailable
from conformance.judge.notes import Notes
from conformance.judge.process_state import PROCESS, lasting_threads
from conformance.judge.watchdog import Watchdog

_PROFILES_S = {"quick": 120.0, "full": 300.0, "deep": 3600.0}
_LEAST_S = 10.0
_MOST_GRACE_S = 20.0  # from the exception to the kill: ranks must be ended meanwhile
_INCIDENTS_A_CLAUSE = 2
# A subject may cost each clause its workers once, and not for ever.
MOST_RESTARTS = _INCIDENTS_A_CLAUSE * len(all_clauses())


class EndedTheRun(AssertionError):
    """The subject raised what pytest takes for an order to stop."""


def shortened_s(base_s: float, hangs: int) -> float:
    """The deadline of a test of whose area `hangs` tests have hung."""
    return min(base_s, max(_LEAST_S, base_s / 2**hangs))


class Deadlines:
    """A pytest plugin of every process that runs tests."""

    def __init__(self, config: pytest.Config, notes: Notes) -> None:
        self._notes = notes
        self._base_s: float = config.option.deadline or _PROFILES_S[config.option.profile]
        self._clauses: dict[str, str] = {}  # by test
        self._watchdog = Watchdog(notes.incidents_file)
        self._stacks = _stacks_file(config, notes)
        self._threads = set(lasting_threads())
        self._session: pytest.Session | None = None
        signal.signal(signal.SIGINT, stop_by_hand)

    @contextlib.contextmanager
    def of_import(self) -> Generator[None]:
        """The deadline of importing the subject."""
        self._watchdog.expect_end("", trial.IMPORT_S + _MOST_GRACE_S)
        try:
            with _alarm(trial.IMPORT_S, f"importing the subject did not end within {trial.IMPORT_S:g} s"):
                yield
        finally:
            self._watchdog.rest()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._clauses = {item.nodeid: clause_of(item) for item in items}
        self._notes.keep_clauses(self._clauses)

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

    @pytest.hookimpl(wrapper=True, trylast=True)  # within pytest's capture, which changes sys.stdout too
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        with self._deadline(item), _process_is_kept(bool(clause_of(item))):
            try:
                return (yield)
            except StoppedByHand:
                raise
            except (KeyboardInterrupt, pytest.exit.Exception) as error:
                raise EndedTheRun(
                    f"{describe(error)}: raised, which would have ended the whole run"
                ) from error

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        if hasattr(session.config, "workerinput"):  # only now, since pytest has sent them elsewhere before
            faulthandler.enable(self._stacks)

    @pytest.hookimpl(wrapper=True)
    def pytest_unconfigure(self) -> Generator[None]:
        yield
        self._watchdog.dismiss()
        if self._session is not None and set(lasting_threads()) - self._threads:
            sys.stdout.flush()  # and end past the threads that the interpreter would wait for
            os._exit(int(self._session.exitstatus))

    @contextlib.contextmanager
    def _deadline(self, item: pytest.Item) -> Generator[None]:
        """An exception where Python can still run; where it cannot, the stacks, before the process is killed."""
        seconds = self._limit_s(item)
        reported = f"the test did not end within {seconds:g} s"
        if seconds < self._own_limit_s(item):
            reported += f" (less than its own {self._own_limit_s(item):g} s, as others of its area have hung)"
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
        """What a test of an area has left of its own deadline; the suite's own tests have all of it."""
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
        ends = _listed(
            f"{incident.nodeid.rpartition('::')[2]} ({incident.outcome})" for incident in incidents
        )
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


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _area(clause: str) -> str:
    return all_clauses()[clause].area if clause in all_clauses() else ""


def _stacks_file(config: pytest.Config, notes: Notes) -> int:
    """A worker's stacks go into the run's notes, from where the verdict is made; else they go to the terminal."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is None:
        return os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)  # as it is before pytest captures it
    return os.open(notes.stack_file(worker), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@contextlib.contextmanager
def _process_is_kept(is_judging: bool) -> Generator[None]:
    """Fail what leaves its process changed, and put that back; the suite's own tests do so themselves, later."""
    before = read(PROCESS) if is_judging else {}
    changed = {}
    try:
        yield
    finally:
        if is_judging:
            changed = put_back(PROCESS, before)
    assert not changed, f"the process was left changed (before, after): {changed}"
