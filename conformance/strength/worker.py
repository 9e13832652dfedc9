"""Handles of workers, and the distribution of trials among them."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Collection, Generator, Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from conformance.judge.clauses import HERE
from conformance.ranks.handle import fork_server, shared_fork_server
from conformance.strength.fork import LOG, Ending, files_to_collect, serve
from conformance.strength.order import Task

_END_S = 10.0
_TAIL = 3000
Result = TypeVar("Result")
# A generator that yields tasks one after another, is sent their endings, and returns its result.
Trial = Generator[Task, Ending, Result]


class Worker:
    """A process that runs tasks one at a time on a subject, `package`, with or without a fault.

    Its tasks may only run tests of the areas of `clauses`, because no others are collected. Without clauses, all are.
    """

    def __init__(self, package: str, profile: str = "quick", clauses: Collection[str] = ()) -> None:
        files = (Path(file).relative_to(HERE.parent) for file in files_to_collect(clauses))
        context = fork_server(*(".".join(file.with_suffix("").parts) for file in files))
        self.tasks, far_end = context.Pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        folder = Path(self._folder.name)
        # A daemon could not start ranks.
        settings = (package, profile, clauses, folder, dict(os.environ), shared_fork_server())
        self._process = context.Process(target=serve, args=(far_end, *settings), daemon=False)
        self._process.start()
        far_end.close()

    def judge(self, task: Task) -> Ending:
        self.tasks.send(task)
        return self.ending()

    def ending(self) -> Ending:
        """Wait for the ending of the task that was sent, and return it.

        Raises:
            RuntimeError: the suite could not be run.
        """
        try:
            answer = self.tasks.recv()
        except (EOFError, ConnectionError):
            answer = "the worker has ended"
        if isinstance(answer, Ending):
            return answer
        log = Path(self._folder.name, LOG)
        reported = log.read_text(errors="replace")[-_TAIL:] if log.is_file() else ""
        raise RuntimeError(f"the suite could not be run: {answer}\n{reported}")

    def close(self) -> None:
        """Kill the process and the processes that it started, which are in its process group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # pyright: ignore[reportArgumentType]
        except ProcessLookupError:  # no group yet, or no process any more
            self._process.kill()
        self._process.join(_END_S)
        self.tasks.close()
        self._folder.cleanup()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class WorkerPool:
    """Several workers that run trials."""

    def __init__(
        self, package: str, jobs: int, profile: str = "quick", clauses: Collection[str] = ()
    ) -> None:
        self._package, self._jobs, self._profile, self._clauses = package, jobs, profile, clauses
        self._workers: list[Worker] = []

    def __enter__(self) -> WorkerPool:
        while len(self._workers) < self._jobs:
            self._workers.append(Worker(self._package, self._profile, self._clauses))
        return self

    def __exit__(self, *error: object) -> None:
        while self._workers:
            self._workers.pop().close()

    def run(self, trials: Iterable[Trial[Result]]) -> Iterator[Result]:
        """Yield the results of the trials in the order in which they end."""
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
