"""A group of ranks that stays up: hands them cases, and never waits for one in vain."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import statistics
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from conformance import simulator
from conformance.judge.library import LookupFailed, NotProvided
from conformance.judge.seeding import run_seed
from conformance.ranks.collective_traces import Collective, CollectiveTraces
from conformance.ranks.errors import (
    Failure,
    PoolBroken,
    RankDied,
    RankFault,
    RankHung,
    RankRaised,
    RanksDiverged,
    Scene,
)
from conformance.ranks.handle import RankHandle
from conformance.ranks.process import Done, Listening, RankSettings, Ready, Resolved
from conformance.ranks.slots import cpu_count, cpu_slots

# After the first failure its peers get this long to fail in their turn, so that the report has their side too.
_GRACE_S = 1.0
# A death is noticed after the errors by which its peers notice it; so much earlier it counts as having happened.
_DEATH_LAG_NS = 500_000_000
_SHOWN_RESULT = 500
CUDA_BACKEND = "TANDEM_CUDA_RANKS"


def backend_for(device: str, world_size: int) -> str:
    """gloo on CPU; nccl where each rank has a GPU of its own, which nccl demands; else gloo for GPU tensors too.

    The simulated device has a backend of its own, on which a collective is work of a stream. The environment variable
    TANDEM_CUDA_RANKS names another backend for CUDA, for example nccl for ranks that share a GPU.
    """
    if device == simulator.NAME:
        return simulator.BACKEND
    if device != "cuda":
        return "gloo"
    own = "nccl" if world_size <= torch.cuda.device_count() else "gloo"
    return os.environ.get(CUDA_BACKEND) or own


class RankPool:
    """`world_size` ranks that stay up between cases; made when the first case comes, made anew after a fault.

    As a context manager it is the throw-away pool for cases that are known to leave their peers hanging.

    Args:
        warm_up: a case and its arguments, run whenever ranks are made, under `start_s` instead of a case's deadline:
            imports that take long belong there.
        start_s: limit for bringing the ranks up, and for importing a case's module.
        turns: a name shared by processes that shall take turns: while a case runs, one of the machine's CPU slots of
            that name is held for each rank (`slots`).
        grace_s: how long ranks may take to notice another's failure, where what they say of it is asked for.

    Ranks have the environment variables of the parent's first rank. One thread at a time may use a pool.
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
        self.starts = 0  # how often ranks were made
        self.traces: Sequence[Sequence[Collective]] = ()  # what each rank issued in the last case
        self._backend = backend or backend_for(device, world_size)
        self.device = device
        self._warm_up = pickle.dumps(warm_up) if warm_up else None
        self._start_s = start_s
        self._turns = turns
        self._grace_s = grace_s
        self._pace = _Pace()
        self._ranks: list[RankHandle] = []
        self._selector = selectors.DefaultSelector()
        self._finalizer = weakref.finalize(self, _end, self._ranks, self._selector)

    def run(self, case: str, *, deadline_s: float = 30.0, **arguments: Any) -> list[Any]:
        """Call `module:function` as `function(Rank(...), **arguments)` on every rank; the results, by rank.

        Arguments and results travel by value (pickle, tensors too); results should lie on the CPU. The deadline
        counts from when every rank has imported the case's module. A case that leaves torch's global state changed
        costs the pool its ranks, not its result, and so does one too many of the process groups that cases leave.

        Raises:
            RankRaised, RankDied, RankHung, RanksDiverged: as the package says; the ranks are gone then.
            NotProvided, LookupFailed: before anything else went wrong a rank asked a subject for a name that it lacks,
                or that cannot be looked up.
            PoolBroken: the ranks did not come up.
        """
        request = pickle.dumps((case, arguments))
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
        except BaseException:  # a test's own deadline, or Ctrl-C, may strike anywhere in here
            self.kill()
            raise
        self._pace.note_success(time.monotonic() - began)
        return results

    def start(self) -> None:
        """Start the ranks now, so that this does not count towards the deadline of the next test.

        Raises:
            PoolBroken: the ranks did not come up.
        """
        try:
            self._bring_up()
        except BaseException:
            self.kill()
            raise

    def _turn(self) -> contextlib.AbstractContextManager[object]:
        if not self._turns:
            return contextlib.nullcontext()
        # A CUDA rank that waits for its device keeps its core busy, unlike one that waits for its peers.
        capacity = cpu_count() if self.device == "cuda" else None
        return cpu_slots(self.world_size, self._turns, capacity=capacity)

    def new_test(self) -> None:
        """Forget the hangs of the test before: cases have their full deadline again."""
        self._pace = _Pace()

    def process_ids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def kill(self) -> None:
        """End the ranks and whatever they started; the next case finds new ones."""
        _end(self._ranks, self._selector)

    def close(self) -> None:
        """End the ranks for good."""
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
            raise RuntimeError("the pool is closed; make another RankPool")
        if self._ranks and not self._is_fit():
            self.kill()
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.forget_output()

    def _is_fit(self) -> bool:
        """Not if a rank has died, or has issued a collective, since its last case was over."""
        return all(key.fileobj is key.data.output for key, _ in self._selector.select(0))

    def _start(self) -> None:
        self.starts += 1
        for number in range(self.world_size):
            settings = RankSettings(number, self.world_size, self._backend, self.device, run_seed())
            self._ranks.append(RankHandle.start(settings))
            self._ranks[-1].watch(self._selector)
        ready: set[int] = set()
        clock = _Clock(self._start_s)
        for rank, message in self._messages(clock):
            match message:
                case Listening(port):
                    for other in self._ranks:
                        other.tell(port, clock.left_s())
                case Ready():
                    ready.add(rank.number)
                case _:
                    raise PoolBroken(f"a rank could not be brought up: {message}\n{rank.wrote()}")
            if len(ready) == self.world_size:
                break
        else:
            late = sorted(set(range(self.world_size)) - ready)
            stacks = "\n".join(_stacks([self._ranks[number] for number in late]).values())
            raise PoolBroken(
                f"of {self.world_size} ranks {late} were not up after {self._start_s:g} s:\n{stacks}"
            )
        if self._warm_up:
            self._run(self._warm_up, self._start_s)

    def _run(self, request: bytes, limit_s: float) -> list[Any]:
        progress = _Progress(self.world_size)
        self.traces = progress.collectives.traces
        clock = _Clock(self._start_s)
        for rank in self._ranks:
            rank.tell(request, clock.left_s())
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
        return [pickle.loads(end.result) for end in done]

    def _messages(self, clock: _Clock) -> Iterator[tuple[RankHandle, Any]]:
        """What the ranks say, until the clock runs out. Their output is kept flowing, so that no print blocks them."""
        while (left_s := clock.left_s()) > 0:
            for key, _ in self._selector.select(left_s):
                for message in key.data.heard(key.fileobj, self._selector):
                    yield key.data, message

    def _fault(self, case: str, progress: _Progress, clock: _Clock) -> RankFault | NotProvided | LookupFailed:
        inside = [rank for rank, end in zip(self._ranks, progress.ends, strict=True) if end is None]
        failures = sorted((end for end in progress.ends if isinstance(end, Failure)), key=_happened_ns)
        scene = Scene(
            case=case,
            world_size=self.world_size,
            failures=failures,
            results={i: _shortened(end) for i, end in enumerate(progress.ends) if isinstance(end, Done)},
            stacks=_stacks(inside),
            outputs={rank.number: rank.wrote() for rank in self._ranks},
            traces=self.traces,
        )
        if failures and not progress.has_diverged_first:
            if failures[0].lookup:
                return failures[0].lookup
            kind = RankRaised if failures[0].exitcode is None else RankDied
            return kind(str(failures[0]), scene)
        if progress.collectives.divergence:
            return RanksDiverged(progress.collectives.divergence, scene)
        what = "inside the case" if progress.resolved == self.world_size else "importing the case's module"
        return RankHung(
            f"ranks {[rank.number for rank in inside]} were still {what} after {clock.limit_s:g} s", scene
        )


class _Clock:
    """Time left, which may be cut short by what happens, and may begin anew until then."""

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
    """How far each rank has come in a case."""

    def __init__(self, world_size: int) -> None:
        self.resolved = 0
        self.collectives = CollectiveTraces(world_size)
        self.ends: list[Done | Failure | None] = [None] * world_size

    @property
    def is_over(self) -> bool:
        return None not in self.ends or bool(self.collectives.divergence)

    @property
    def has_diverged_first(self) -> bool:
        """What ranks raise because of that may be heard before the last of what they have issued."""
        failures = (end for end in self.ends if isinstance(end, Failure))
        return self.collectives.divergence != "" and all(
            self.collectives.diverged_ns <= failure.when_ns for failure in failures
        )

    def take(self, rank: int, message: Any) -> None:
        match message:
            case Resolved():
                self.resolved += 1
            case Collective():
                self.collectives.issued(rank, message)
            case Done():
                self.ends[rank] = message
                self.collectives.ended(rank)
            case Failure():
                # Its first failure is the one that tells: a rank that has raised may die while it leaves its group.
                if not isinstance(self.ends[rank], Failure):
                    self.ends[rank] = message
            case _:
                raise AssertionError(f"rank {rank} sent {message!r} in the middle of a case")


class _Pace:
    """How long a case may take, in the light of what has happened in the same test.

    Hypothesis shrinks a hang by running a hundred cases that hang too. Once one has been seen, a multiple of what the
    good cases took is enough to suspect another; when the same case comes again, as the final one does, it gets its
    full deadline, so that what is reported has hung for that long.
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
    """Empties both in place: what finalizes a pool must not hold the pool itself."""
    for key in list((selector.get_map() or {}).values()):
        selector.unregister(key.fileobj)
    for rank in ranks:
        rank.kill()
    while ranks:
        ranks.pop().bury()


def _stacks(ranks: Sequence[RankHandle]) -> dict[int, str]:
    for rank in ranks:
        rank.ask_for_stack()
    return {rank.number: rank.stack() for rank in ranks}


def _happened_ns(failure: Failure) -> int:
    return failure.when_ns - (_DEATH_LAG_NS if failure.exitcode is not None else 0)


def _shortened(done: Done) -> str:
    try:
        text = repr(pickle.loads(done.result))
    except Exception as error:
        text = f"something that cannot be shown ({type(error).__name__}: {error})"
    return text if len(text) <= _SHOWN_RESULT else f"{text[:_SHOWN_RESULT]}…"
