"""Leaks of faulty ranks, counted by a process of its own that runs faults in random order."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from conformance.judge.rank_errors import RankFault, RanksDiverged
from conformance.judge.sandbox.marked_processes import marked_processes
from conformance.ranks import RankPool
from conformance.ranks.failing_programs import EXPECTED, deadline_s

CASES = "conformance.ranks.failing_programs"
WORLD_SIZES = (1, 2, 3)
SETTLE_S = 10.0  # a killed process needs time to end


def resources() -> dict[str, int]:
    """Count what this process and all processes that it started, directly or not, hold."""
    open_files, processes = 0, marked_processes(f"TANDEM_MARK={os.environ['TANDEM_MARK']}")
    for process in processes:
        with contextlib.suppress(OSError):  # a process that has ended
            open_files += len(list(Path(f"/proc/{process}/fd").iterdir()))
    return {
        "processes": len(processes),
        "open files": open_files,
        "shared memory": len(os.listdir("/dev/shm")),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }


def leaks_since(before: dict[str, int]) -> dict[str, int]:
    end = time.monotonic() + SETTLE_S
    while True:
        after = resources()
        leaks = {name: after[name] - count for name, count in before.items() if after[name] > count}
        if not leaks or time.monotonic() > end:
            return leaks
        time.sleep(0.05)


def cause(pool: RankPool, fault: str, where: int) -> None:
    pool.new_test()
    try:
        pool.run(f"{CASES}:{fault}", where=where, deadline_s=deadline_s(fault))
        error = None
    except RankFault as raised:
        error = raised
    assert (type(error) if error else None) is EXPECTED[fault], f"{fault} in rank {where}: {error}"
    if fault == "dies_later":
        wait_for_death(pool)
    check_health(pool)


def wait_for_death(pool: RankPool) -> None:
    """Wait until a rank has ended. Otherwise the death could count as a failure of a later case."""
    end = time.monotonic() + SETTLE_S
    while all(Path(f"/proc/{pid}").exists() for pid in pool.process_ids()) and time.monotonic() < end:
        time.sleep(0.01)


def check_health(pool: RankPool) -> None:
    size = pool.world_size
    assert pool.run(f"{CASES}:healthy") == [size * (size + 1) / 2] * size


def main(faults: int) -> None:
    draw = random.Random(1)
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(RankPool(size)) for size in WORLD_SIZES]
        for pool in pools:
            check_health(pool)
        warm = resources()
        for _ in range(faults):
            pool = draw.choice(pools)
            names = [name for name in EXPECTED if pool.world_size > 1 or EXPECTED[name] is not RanksDiverged]
            cause(pool, draw.choice(names), draw.randrange(pool.world_size))
        leaks = leaks_since(warm)
    ended = leaks_since(warm | {"processes": warm["processes"] - sum(WORLD_SIZES)})
    json.dump({"between cases": leaks, "at the end": ended}, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
