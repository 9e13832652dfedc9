"""Cases that succeed, and cases that fail in every way that a case can fail, to test the pool.

`where` is the rank that fails. Its peers wait in a collective meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.judge.rank_errors import RankDied, RankFault, RankHung, RankRaised, RanksDiverged
from conformance.ranks.channel import Channel
from conformance.ranks.process import MOST_GROUPS, Rank

_FOREVER_S = 3600.0

# The exception that each case must cause, or None if it must succeed.
EXPECTED: dict[str, type[RankFault] | None] = {
    "raises": RankRaised,
    "raises_everywhere": RankRaised,
    "raises_without_text": RankRaised,
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


def deadline_s(fault: str) -> float:
    return 0.5 if EXPECTED[fault] is RankHung else 30.0


def healthy(rank: Rank) -> float:
    """Return the sum of all ranks' numbers, which would be wrong if data of an earlier case were left."""
    number = torch.tensor(float(rank.rank + 1))
    dist.all_reduce(number)
    return number.item()


def all_reduce(rank: Rank, *, values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return this rank's tensor after an all-reduce to which rank i contributes `values[i]`."""
    tensor = values[rank.rank].to(rank.device, copy=True)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return tensor.cpu()


def raises(rank: Rank, *, where: int) -> float:
    if rank.rank == where:
        raise ValueError(f"injected into rank {where}")
    return healthy(rank)


def raises_everywhere(rank: Rank, *, where: int) -> None:
    raise ValueError(f"injected into rank {rank.rank}")


def raises_without_text(rank: Rank, *, where: int) -> float:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text either")

    if rank.rank == where:
        raise Hostile
    return healthy(rank)


def exits(rank: Rank, *, where: int) -> float:
    if rank.rank == where:
        os._exit(7)
    return healthy(rank)


def asks_to_exit(rank: Rank, *, where: int) -> float:
    if rank.rank == where:
        sys.exit(3)
    return healthy(rank)


def is_killed(rank: Rank, *, where: int) -> float:
    """Kill a rank, as the kernel does if memory runs out."""
    if rank.rank == where:
        os.kill(os.getpid(), signal.SIGKILL)
    return healthy(rank)


def segfaults(rank: Rank, *, where: int) -> float:
    if rank.rank == where:
        ctypes.string_at(0)
    return healthy(rank)


def runs_out_of_memory(rank: Rank, *, where: int) -> float:
    """Allocate memory until the system refuses, after limiting it to little more than the rank uses."""
    spare_bytes = 1 << 28
    if rank.rank == where:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + spare_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        tensors = []
        while True:
            tensors.append(torch.ones(spare_bytes >> 4))
    return healthy(rank)


def sleeps(rank: Rank, *, where: int) -> float:
    """Hang outside of any collective."""
    if rank.rank == where:
        time.sleep(_FOREVER_S)
    return healthy(rank)


def holds_pythons_lock(rank: Rank, *, where: int) -> float:
    """Hang in C while no other thread of the rank can run."""
    if rank.rank == where:
        ctypes.PyDLL(None).sleep(int(_FOREVER_S))
    return healthy(rank)


def is_stopped(rank: Rank, *, where: int) -> float:
    if rank.rank == where:
        os.kill(os.getpid(), signal.SIGSTOP)
    return healthy(rank)


def receives_without_sender(rank: Rank, *, where: int) -> float:
    """Hang in a receive without a sender. It is not a collective, so there is nothing to compare."""
    if rank.rank == where and rank.world_size > 1:
        dist.recv(torch.empty(1), src=(where + 1) % rank.world_size)
    elif rank.rank == where:
        time.sleep(_FOREVER_S)
    return healthy(rank)


def skips_a_collective(rank: Rank, *, where: int) -> float:
    return 0.0 if rank.rank == where else healthy(rank)


def mismatched_size(rank: Rank, *, where: int) -> list[float]:
    numbers = torch.ones(4 if rank.rank == where else 3)
    dist.all_reduce(numbers)
    return numbers.tolist()


def mismatched_collective(rank: Rank, *, where: int) -> list[float]:
    numbers = torch.ones(3)
    if rank.rank == where:
        dist.broadcast(numbers, src=0)
    else:
        dist.all_reduce(numbers)
    return numbers.tolist()


def talks(rank: Rank, *, where: int) -> float:
    """Write more than a pipe holds, by Python's streams and by the operating system, then continue."""
    if rank.rank == where:
        for _ in range(8):
            print("x" * (1 << 19))  # noqa: T201 output of the case
            os.write(2, b"y" * (1 << 19))
    return healthy(rank)


def talks_and_raises(rank: Rank, *, where: int) -> float:
    if rank.rank == where:
        print("the last words")  # noqa: T201 output of the case
    return raises(rank, where=where)


def talks_without_end(rank: Rank, *, where: int) -> float:
    while rank.rank == where:
        print("z" * 1000)  # noqa: T201 output of the case
    return healthy(rank)


def returns_unpicklable(rank: Rank, *, where: int) -> Callable[[], Any]:
    return lambda: rank.rank


def returns_much(rank: Rank, *, where: int) -> torch.Tensor:
    return torch.full((1 << 24,), float(rank.rank))


def leaves_a_process(rank: Rank, *, where: int) -> float:
    """Start a process that survives its rank unless the pool ends it too."""
    if rank.rank == where:
        subprocess.Popen(["sleep", str(int(_FOREVER_S))])
    return raises(rank, where=where)


def leaves_torch_changed(rank: Rank, *, where: int) -> str:
    was = str(torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    return was


def leaves_groups(rank: Rank, *, where: int) -> int:
    groups = dist.get_pg_count()
    for _ in range(MOST_GROUPS):  # more groups than a pool allows
        dist.new_group(list(range(rank.world_size)))
    return groups


def sums_over_a_mesh(rank: Rank) -> float:
    """Return a sum over a group that only the mesh has, made of its two dimensions."""
    group = rank.mesh(rank.world_size, 1, names=("a", "b"))._flatten("both").get_group()
    number = torch.tensor([1.0 + rank.rank])
    dist.all_reduce(number, group=group)
    return number.item()


def dies_later(rank: Rank, *, where: int) -> float:
    """Finish the case, then end the process once the parent has received the result."""
    total = healthy(rank)
    if rank.rank == where:
        threading.Thread(target=_exit_once_idle, args=[threading.get_ident()]).start()
    return total


def _exit_once_idle(serving: int) -> None:
    while not _waits_for_a_case(serving):
        time.sleep(0.005)
    os._exit(9)


def _waits_for_a_case(thread: int) -> bool:
    stack = traceback.walk_stack(sys._current_frames()[thread])
    return any(frame.f_code is Channel.receive.__code__ for frame, _ in stack)


def open_files(rank: Rank) -> int:
    return len(os.listdir("/proc/self/fd"))


_remembered: list[Any] = []


def remember(rank: Rank, *, value: Any) -> None:
    _remembered.append(value)


def recall(rank: Rank) -> list[Any]:
    return _remembered


def hangs_from(rank: Rank, *, size: int, least: int) -> int:
    """Hang outside of collectives if `size` is at least `least`."""
    if size >= least:
        time.sleep(_FOREVER_S)
    return size


def echo(rank: Rank, *, value: Any) -> Any:
    return value


def random_numbers(rank: Rank) -> list[float]:
    return torch.randn(3).tolist()
