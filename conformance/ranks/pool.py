"""Pool of ranks that stay up between cases. It never waits for a rank that cannot answer."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from conformance import simulator
from conformance.judge.library import LookupFailed, NotProvided
from conformance.judge.rank_errors import (
    Failure,
    FaultRecord,
    PoolBroken,
    RankDied,
    RankFault,
    RankHung,
    RankRaised,
    RanksDiverged,
)
from conformance.judge.sandbox.environment import device_modules
from conformance.judge.sandbox.seeding import run_seed
from conformance.ranks.collective_traces import Collective, CollectiveTraces
from conformance.ranks.handle import RankHandle
from conformance.ranks.process import Done, Listening, RankSettings, Ready, Resolved
from conformance.ranks.slots import cpu_count, cpu_slots

# Time for the peers of the first failing rank to fail as well, so that the report includes them.
_GRACE_S = 1.0
# Correction of the time of a death, because the parent notices it after the errors that it causes in other ranks.
_DEATH_LAG_NS = 500_000_000
_SHOWN_RESULT = 500
CUDA_BACKEND = "TANDEM_CUDA_RANKS"


def backend_for(device: str) -> str:
    """Return the backend for a device: gloo for the CPU, nccl for CUDA if torch has it. Ranks may share a GPU.

    The simulated device has its own backend, which runs collectives on streams. Another device has the backend that it
    registered, or gloo. The environment variable TANDEM_CUDA_RANKS names another backend for CUDA. With gloo, torch
    2.11 dies when it gathers a DTensor on CUDA.
    """
    if device == simulator.NAME:
        return simulator.BACKEND
    if device != "cuda":
        return dist.Backend.default_device_backend_map.get(device, "gloo")
    return os.environ.get(CUDA_BACKEND) or ("nccl" if dist.is_nccl_available() else "gloo")


class RankPool:
    """`world_size` ranks that stay up between cases. They start with the first case, and again after a fault.

    As a context manager the pool ends its ranks at exit, for cases that are known to leave ranks hanging.

    Args:
        warm_up: a case and its arguments, run whenever ranks start, with the limit `start_s` instead of a case's
            deadline. Long imports belong here.
        start_s: time limit for starting the ranks, and for importing a case's module.
        turns: a name shared by processes that take turns. While a case runs, the pool holds one of the machine's CPU
            slots of that name for each rank (`slots`).
        grace_s: time for ranks to notice the failure of another rank, for tests of their errors.

    Ranks have the environment variables of the time when they start, but torch was imported earlier. Only one thread at
    a time may use a pool.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "cpu",
        backend: str | None = None,
        warm_up: tuple[str, Mapping[str, Any]] | None = None,
        start_s: float = 60.0,
        turns: str | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; a group has at least one rank")
        self.world_size = world_size
        self.starts = 0  # number of times that ranks were started
        self.traces: Sequence[Sequence[Collective]] = ()  # collectives of each rank in the last case
        self.hazards: Sequence[str] = ()  # hazards of the last case
        self._backend = backend or backend_for(device)
        self.device = device
        self._warm_up = pickle.dumps(warm_up) if warm_up else None
        self._start_s = start_s
        self._turns = turns
        self._grace_s = grace_s
        self._pace = _Pace()
        self._ranks: list[RankHandle] = []
        self._selector = selectors.DefaultSelector()
        self._finalizer = weakref.finalize(self, _end, self._ranks, self._selector)

    def run(self, case: str | Callable[..., Any], *, deadline_s: float = 30.0, **arguments: Any) -> list[Any]:
        """Call `case(Rank(...), **arguments)` on every rank and return the results by rank.

        The case is a function at the top level of a module, or the name `module:function` of a function that only
        ranks import.

        Arguments and results are pickled by value, tensors included. Results should be on the CPU. The deadline starts
        when every rank has imported the case's module. If a case leaves torch's global state changed, or too many
        process groups, its result is returned, but the next case gets new ranks.

        Raises:
            RankRaised, RankDied, RankHung, RanksDiverged: as the package describes. The ranks are ended.
            NotProvided: the first failure is a name that the subject lacks.
            LookupFailed: the first failure is a name that cannot be looked up.
            PoolBroken: the ranks could not be started.
        """
        name = case if isinstance(case, str) else f"{case.__module__}:{case.__qualname__}"
        request = pickle.dumps((name, arguments))
        limit_s = self._pace.limit_s(request, deadline_s)
        try:
            self._bring_up()
            with self._turn():
                began = time.monotonic()
                results = self._run(request, limit_s)
        except RankHung:
            self._pace.note_hang(request)
            self.kill()
            raise
        except BaseException:  # any failure, the test's deadline or Ctrl-C
            self.kill()
            raise
        self._pace.note_success(time.monotonic() - began)
        return results

    def start(self) -> None:
        """Start the ranks now, so that this does not count towards the deadline of the next test.

        Raises:
            PoolBroken: the ranks could not be started.
        """
        try:
            self._bring_up()
        except BaseException:
            self.kill()
            raise

    def _turn(self) -> contextlib.AbstractContextManager[object]:
        if not self._turns:
            return contextlib.nullcontext()
        # A CUDA rank that waits for its device keeps its core busy, unlike a rank that waits for its peers.
        capacity = cpu_count() if self.device == "cuda" else None
        return cpu_slots(self.world_size, self._turns, capacity=capacity)

    def new_test(self) -> None:
        """Forget the hangs of the previous test, so that cases have their full deadline again."""
        self._pace = _Pace()

    def process_ids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def kill(self) -> None:
        """End the ranks and the processes that they started. The next case gets new ranks."""
        _end(self._ranks, self._selector)

    def close(self) -> None:
        """End the ranks permanently."""
        self._finalizer()
        self._selector.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bring_up(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("the pool is closed; create another RankPool")
        if self._ranks and not self._is_fit():
            self.kill()
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.forget_output()

    def _is_fit(self) -> bool:
        """Return whether no rank has died or issued a collective since the end of the last case."""
        return all(key.fileobj is key.data.output for key, _ in self._selector.select(0))

    def _start(self) -> None:
        self.starts += 1
        module = device_modules.get(self.device, "")
        for number in range(self.world_size):
            settings = RankSettings(
                number, self.world_size, self._backend, self.device, module, run_seed(), dict(os.environ)
            )
            self._ranks.append(RankHandle.start(settings))
            self._ranks[-1].watch(self._selector)
        ready: set[int] = set()
        clock = _Clock(self._start_s)
        for rank, message in self._messages(clock):
            match message:
                case Listening(port):
                    for other in self._ranks:
                        other.send(port, clock.left_s())
                case Ready():
                    ready.add(rank.number)
                case _:
                    raise PoolBroken(f"a rank could not be started: {message}\n{rank.output_tail()}")
            if len(ready) == self.world_size:
                break
        else:
            late = sorted(set(range(self.world_size)) - ready)
            stacks = "\n".join(_stacks([self._ranks[number] for number in late]).values())
            raise PoolBroken(
                f"the ranks {late} of {self.world_size} had not started after {self._start_s:g} s:\n{stacks}"
            )
        if self._warm_up:
            self._run(self._warm_up, self._start_s)

    def _run(self, request: bytes, limit_s: float) -> list[Any]:
        progress = _Progress(self.world_size)
        self.traces = progress.collectives.traces
        clock = _Clock(self._start_s)
        for rank in self._ranks:
            rank.send(request, clock.left_s())
        for rank, message in self._messages(clock):
            progress.take(rank.number, message)
            if isinstance(message, Failure):
                clock.shorten(self._grace_s)
            elif isinstance(message, Resolved) and progress.resolved == self.world_size:
                clock.restart(limit_s)
            if progress.is_over:
                break
        done = [end for end in progress.ends if isinstance(end, Done)]
        if len(done) < self.world_size or progress.collectives.divergence:
            raise self._fault(pickle.loads(request)[0], progress, clock)
        if not all(end.is_clean for end in done):
            self.kill()
        self.hazards = [hazard for end in done for hazard in end.hazards]
        return [pickle.loads(end.result) for end in done]

    def _messages(self, clock: _Clock) -> Iterator[tuple[RankHandle, Any]]:
        """Yield the ranks' messages until the time is over. Their output is read too, so that no print blocks."""
        while (left_s := clock.left_s()) > 0:
            for key, _ in self._selector.select(left_s):
                for message in key.data.read(key.fileobj, self._selector):
                    yield key.data, message

    def _fault(self, case: str, progress: _Progress, clock: _Clock) -> RankFault | NotProvided | LookupFailed:
        inside = [rank for rank, end in zip(self._ranks, progress.ends, strict=True) if end is None]
        failures = sorted((end for end in progress.ends if isinstance(end, Failure)), key=_happened_ns)
        record = FaultRecord(
            case=case,
            world_size=self.world_size,
            failures=failures,
            results={i: _shorten(end) for i, end in enumerate(progress.ends) if isinstance(end, Done)},
            stacks=_stacks(inside),
            outputs={rank.number: rank.output_tail() for rank in self._ranks},
            traces=self.traces,
        )
        if failures and not progress.has_diverged_first:
            if failures[0].lookup:
                return failures[0].lookup
            kind = RankRaised if failures[0].exitcode is None else RankDied
            return kind(str(failures[0]), record)
        if progress.collectives.divergence:
            return RanksDiverged(progress.collectives.divergence, record)
        activity = (
            "running the case" if progress.resolved == self.world_size else "importing the case's module"
        )
        return RankHung(
            f"ranks {[rank.number for rank in inside]} were still {activity} after {clock.limit_s:g} s",
            record,
        )


class _Clock:
    """The time left. It can be restarted until it is shortened."""

    def __init__(self, limit_s: float) -> None:
        self._is_short = False
        self.restart(limit_s)

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def restart(self, limit_s: float) -> None:
        if not self._is_short:
            self.limit_s = limit_s
            self._end = time.monotonic() + limit_s

    def shorten(self, limit_s: float) -> None:
        self._is_short = True
        self._end = min(self._end, time.monotonic() + limit_s)


class _Progress:
    """Progress of all ranks in a case."""

    def __init__(self, world_size: int) -> None:
        self.resolved = 0
        self.collectives = CollectiveTraces(world_size)
        self.ends: list[Done | Failure | None] = [None] * world_size

    @property
    def is_over(self) -> bool:
        return None not in self.ends or bool(self.collectives.divergence)

    @property
    def has_diverged_first(self) -> bool:
        """Whether ranks diverged before any rank failed.

        The error that a divergence causes may arrive before the last collectives that the ranks issued.
        """
        failures = (end for end in self.ends if isinstance(end, Failure))
        return self.collectives.divergence != "" and all(
            self.collectives.diverged_ns <= failure.when_ns for failure in failures
        )

    def take(self, rank: int, message: Any) -> None:
        match message:
            case Resolved():
                self.resolved += 1
            case Collective():
                self.collectives.add(rank, message)
            case Done():
                self.ends[rank] = message
                self.collectives.end_case(rank)
            case Failure():
                # The first failure of a rank counts, because a rank that raised may die while it leaves its group.
                if not isinstance(self.ends[rank], Failure):
                    self.ends[rank] = message
            case _:
                raise AssertionError(f"rank {rank} sent {message!r} in the middle of a case")


class _Pace:
    """The time limit of a case, which depends on earlier cases of the same test.

    Hypothesis shrinks a hang by running about a hundred cases that hang too. After the first hang, a case that takes a
    multiple of the usual time is suspected to hang. If the same case runs again, as the final one does, it gets its
    full deadline, so that a reported case has hung for that long.
    """

    _LEAST_S = 0.3
    _TIMES_TYPICAL = 20

    def __init__(self) -> None:
        self._good_s: deque[float] = deque(maxlen=50)
        self._suspected: set[bytes] = set()
        self._confirmed: set[bytes] = set()

    def limit_s(self, request: bytes, deadline_s: float) -> float:
        if not self._confirmed or request in self._suspected:
            return deadline_s
        typical_s = statistics.median(self._good_s) if self._good_s else 0.0
        return min(deadline_s, max(self._LEAST_S, self._TIMES_TYPICAL * typical_s))

    def note_success(self, seconds: float) -> None:
        self._good_s.append(seconds)

    def note_hang(self, request: bytes) -> None:
        if not self._confirmed or request in self._suspected:
            self._suspected.discard(request)
            self._confirmed.add(request)
        elif request not in self._confirmed:
            self._suspected.add(request)


def _end(ranks: list[RankHandle], selector: selectors.BaseSelector) -> None:
    """End all ranks and clear both arguments. This is a function because a finalizer must not refer to its pool."""
    for key in list((selector.get_map() or {}).values()):
        selector.unregister(key.fileobj)
    for rank in ranks:
        rank.kill()
    while ranks:
        ranks.pop().join_and_close()


def _stacks(ranks: Sequence[RankHandle]) -> dict[int, str]:
    for rank in ranks:
        rank.ask_for_stack()
    return {rank.number: rank.stack() for rank in ranks}


def _happened_ns(failure: Failure) -> int:
    return failure.when_ns - (_DEATH_LAG_NS if failure.exitcode is not None else 0)


def _shorten(done: Done) -> str:
    try:
        text = repr(pickle.loads(done.result))
    except Exception as error:
        text = f"a value that cannot be shown ({type(error).__name__}: {error})"
    return text if len(text) <= _SHOWN_RESULT else f"{text[:_SHOWN_RESULT]}…"
