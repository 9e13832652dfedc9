"""Soak test: faults one after another in random order, and the resources that the pools leak."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from conformance.judge.rank_errors import RankDied, RankFault, RankHung, RankRaised, RanksDiverged
from conformance.judge.sandbox.marked_processes import marked_processes
from conformance.ranks.pool import RankPool

# The exception that each case of `failing_programs` must cause, or None if it must succeed.
EXPECTED: dict[str, type[RankFault] | None] = {
    "raises": RankRaised,
    "raises_everywhere": RankRaised,
    "raises_what_has_no_text": RankRaised,
    "asks_to_exit": RankRaised,
    "returns_unpicklable": RankRaised,
    "talks_and_raises": RankRaised,
    "leaves_a_process": RankRaised,
    "runs_out_of_memory": RankRaised,
    "exits": RankDied,
    "is_killed": RankDied,
    "segfaults": RankDied,
    "sleeps": RankHung,
    "holds_pythons_lock": RankHung,
    "is_stopped": RankHung,
    "receives_without_sender": RankHung,
    "skips_a_collective": RanksDiverged,
    "mismatched_size": RanksDiverged,
    "mismatched_collective": RanksDiverged,
    "talks": None,
    "returns_much": None,
    "leaves_torch_changed": None,
    "leaves_groups": None,
    "dies_later": None,
}
HANG_S = 0.5
_GOOD_S = 30.0
_SETTLE_S = 10.0
# Environment variable of every process that this process starts, directly or not, even if its parent has ended.
_MARK = "TANDEM_SOAK"
_LISTENING = "0A"  # state in /proc/net/tcp


def deadline_s(fault: str) -> float:
    return HANG_S if EXPECTED[fault] is RankHung else _GOOD_S


def needs_peers(fault: str) -> bool:
    return EXPECTED[fault] is RanksDiverged


@dataclass(frozen=True)
class Census:
    processes: int
    open_files: int
    ports: int
    shared_memory: frozenset[str]
    temporary: frozenset[str]

    @classmethod
    def take(cls) -> Census:
        processes = marked_processes(f"{_MARK}={os.environ[_MARK]}")
        return cls(
            processes=len(processes),
            open_files=len(os.listdir("/proc/self/fd")),
            ports=len(_listening() & {socket for pid in processes for socket in _sockets(pid)}),
            shared_memory=frozenset(os.listdir("/dev/shm")),
            temporary=frozenset(os.listdir(tempfile.gettempdir())),
        )

    def leaks_since(self, before: Census) -> dict[str, Any]:
        leaks = {
            "processes": max(0, self.processes - before.processes),
            "open_files": max(0, self.open_files - before.open_files),
            "ports": max(0, self.ports - before.ports),
            "shared_memory": sorted(self.shared_memory - before.shared_memory),
            "temporary": sorted(self.temporary - before.temporary),
        }
        return {name: leak for name, leak in leaks.items() if leak}

    def counts(self) -> dict[str, int]:
        return {name: value if isinstance(value, int) else len(value) for name, value in vars(self).items()}


def _listening() -> set[str]:
    """Return the inodes of all sockets of this machine that listen for TCP connections."""
    rows = [line.split() for kind in ("tcp", "tcp6") for line in _lines(Path("/proc/net") / kind)[1:]]
    return {row[9] for row in rows if row[3] == _LISTENING}


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _sockets(pid: int) -> list[str]:
    inodes: list[str] = []
    with contextlib.suppress(OSError):  # a process that has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(descriptor).partition(":")
                inodes += [inode.strip("[]")] if kind == "socket" else []
    return inodes


@dataclass
class Figures:
    faults: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    # Faults with another end than expected, and good cases that failed after a fault.
    surprises: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    warm: dict[str, int] = field(default_factory=dict)
    after_faults: dict[str, int] = field(default_factory=dict)
    at_the_end: dict[str, int] = field(default_factory=dict)
    was_stopped: bool = False
    leaks_between: dict[str, Any] = field(default_factory=dict)
    leaks_at_the_end: dict[str, Any] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not (self.was_stopped or self.surprises or self.leaks_between or self.leaks_at_the_end)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_good": self.is_good}


def soak(
    faults: int,
    world_sizes: Sequence[int],
    seed: int,
    progress: Callable[[int, str], None] = lambda done, name: None,
) -> Figures:
    """Run `faults` faults on one pool for each world size. Run a case that must succeed after each fault."""
    os.environ[_MARK] = uuid.uuid4().hex
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    figures = Figures()
    draw = random.Random(seed)
    _take_own_temporary_folder()
    with ExitStack() as stack:
        pools = [stack.enter_context(RankPool(size)) for size in world_sizes]
        for pool in pools:
            _check_health(pool, figures)
        warm = Census.take()
        figures.warm = warm.counts()
        try:
            _throw_all(pools, faults, draw, figures, progress)
        except KeyboardInterrupt:
            figures.was_stopped = True
        figures.leaks_between = _leaks_after_settling(warm)
        figures.after_faults = Census.take().counts()
        figures.starts = sum(pool.starts for pool in pools)
        # The ranks are ended now. Only they held ports.
        expected = replace(warm, processes=warm.processes - sum(world_sizes), ports=0)
    figures.leaks_at_the_end = _leaks_after_settling(expected)
    figures.at_the_end = Census.take().counts()
    return figures


def _take_own_temporary_folder() -> None:
    """Use a new temporary folder, in which only this process has files. It is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="soak-")
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    # multiprocessing removes its folder inside with priority -100, which is earlier.
    Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)


def _throw_all(
    pools: Sequence[RankPool],
    faults: int,
    draw: random.Random,
    figures: Figures,
    progress: Callable[[int, str], None],
) -> None:
    for done in range(faults):
        pool = draw.choice(pools)
        fault = draw.choice([name for name in EXPECTED if pool.world_size > 1 or not needs_peers(name)])
        progress(done, fault)
        _throw(pool, fault, draw.randrange(pool.world_size), figures)
        _check_health(pool, figures)
        figures.faults += 1


def _throw(pool: RankPool, fault: str, where: int, figures: Figures) -> None:
    expected = EXPECTED[fault]
    pool.new_test()
    began = time.monotonic()
    try:
        pool.run(f"conformance.ranks.failing_programs:{fault}", where=where, deadline_s=deadline_s(fault))
        actual = None
    except RankFault as error:
        actual = type(error)
        if actual is not expected:
            figures.surprises.append(f"{fault} in rank {where} of {pool.world_size}: {error}")
    if expected is not None and actual is None:
        figures.surprises.append(f"{fault} in rank {where} of {pool.world_size} went unnoticed")
    if fault == "dies_later" and actual is None:
        _wait_for_a_death(pool)
    kind = actual.__name__ if actual else "no fault"
    figures.kinds[kind] = figures.kinds.get(kind, 0) + 1
    figures.seconds[fault] = max(figures.seconds.get(fault, 0.0), round(time.monotonic() - began, 3))


def _wait_for_a_death(pool: RankPool) -> None:
    """Wait until a rank has ended. Otherwise the death could count as a failure of a later case."""
    end = time.monotonic() + _SETTLE_S
    while all(Path(f"/proc/{pid}").exists() for pid in pool.process_ids()) and time.monotonic() < end:
        time.sleep(0.01)


def _check_health(pool: RankPool, figures: Figures) -> None:
    size = pool.world_size
    try:
        sums = pool.run("conformance.ranks.failing_programs:healthy")
    except RankFault as error:
        figures.surprises.append(f"a good case failed: {error}")
    else:
        if sums != [size * (size + 1) / 2] * size:
            figures.surprises.append(f"a good case gave {sums} on {size} ranks")


def _leaks_after_settling(before: Census) -> dict[str, Any]:
    """Return the leaks since `before`. Wait for a while, because a killed process needs time to end."""
    end = time.monotonic() + _SETTLE_S
    while (leaks := Census.take().leaks_since(before)) and time.monotonic() < end:
        time.sleep(0.05)
    return leaks
