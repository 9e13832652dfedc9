"""The parent's hold on workers, and how trials are shared out among them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Collection, Generator, Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from conformance.faults.fork import LOG, Ending, serve
from conformance.faults.order import Task

_END_S = 10.0
_TAIL = 3000
Result = TypeVar("Result")
# Yields the tasks it wants, one after the other, is sent their endings, and returns what it has found.
Trial = Generator[Task, Ending, Result]


class Worker:
    """Runs tasks one at a time on a subject, `package`, as it is or with a fault in it.

    Its tasks may ask for the tests of these clauses, or of all if none is named: what is not asked is not collected.
    """

    def __init__(self, package: str, profile: str = "quick", clauses: Collection[str] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        self.tasks, far_end = context.Pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        folder = Path(self._folder.name)
        # Not a daemon: tests start ranks, and daemons may start nothing.
        self._process = context.Process(target=serve, args=(far_end, package, profile, clauses, folder))
        self._process.start()
        far_end.close()

    def judge(self, task: Task) -> Ending:
        self.tasks.send(task)
        return self.ending()

    def ending(self) -> Ending:
        """Of the task that was sent; waits for it.

        Raises:
            RuntimeError: the suite could not be run.
        """
        try:
            found = self.tasks.recv()
        except (EOFError, ConnectionError):
            found = "the worker has ended"
        if isinstance(found, Ending):
            return found
        log = Path(self._folder.name, LOG)
        reported = log.read_text(errors="replace")[-_TAIL:] if log.is_file() else ""
        raise RuntimeError(f"the suite could not be run: {found}\n{reported}")

    def close(self) -> None:
        """End the process, and what it started: it leads a process group of its own."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # pyright: ignore[reportArgumentType]
        except ProcessLookupError:  # it had not come to lead one yet, or is gone
            self._process.kill()
        self._process.join(_END_S)
        self.tasks.close()
        self._folder.cleanup()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Crew:
    """Several workers, among which trials are shared out."""

    def __init__(
        self, package: str, jobs: int, profile: str = "quick", clauses: Collection[str] = ()
    ) -> None:
        self._package, self._jobs, self._profile, self._clauses = package, jobs, profile, clauses
        self._workers: list[Worker] = []

    def __enter__(self) -> Crew:
        while len(self._workers) < self._jobs:
            self._workers.append(Worker(self._package, self._profile, self._clauses))
        return self

    def __exit__(self, *error: object) -> None:
        while self._workers:
            self._workers.pop().close()

    def run(self, trials: Iterable[Trial[Result]]) -> Iterator[Result]:
        """The trials' results, in the order in which they end."""
        waiting = iter(trials)
        busy: dict[Any, tuple[Worker, Trial[Result]]] = {}

        def begin(worker: Worker) -> None:
            for trial in waiting:
                worker.tasks.send(next(trial))
                busy[worker.tasks] = (worker, trial)
                return

        for worker in self._workers:
            begin(worker)
        while busy:
            for ready in connection.wait(busy):
                worker, trial = busy.pop(ready)
                try:
                    worker.tasks.send(trial.send(worker.ending()))
                    busy[ready] = (worker, trial)
                except StopIteration as ended:
                    begin(worker)
                    yield ended.value
