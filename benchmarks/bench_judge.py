"""Cost of the judge: seconds per clause, and seconds of a pool of two ranks. torch has no counterpart.

The judge is the one of the working tree, like the benchmarks.
"""

import importlib.util
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "clip_grad_value_": "conformance/nn/utils/test_clip_grad_value.py",
    "GradScaler.update": "conformance/amp/test_grad_scaler_update.py",
}
PARTS = ["start", "warm case", "rebuild after a fault"]
DEADLINE_S = 240
WARM_CASES = 30
CASE = "conformance.ranks.failing_programs"


class Clause:
    """Wall time of a fresh pytest process on one file ÷ its clauses, with profile quick and without workers."""

    params = [list(TESTS)]
    param_names = ["tests"]
    version = "1"
    timeout = DEADLINE_S

    def setup(self, tests):
        _require("pytest")

    def track_seconds(self, tests):
        command = [sys.executable, "-m", "pytest", TESTS[tests], "--profile=quick", "-q"]
        began = time.perf_counter()
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        took_s = time.perf_counter() - began
        counted = re.search(r"(\d+) clauses in \d+ tests", run.stdout)
        if run.returncode or counted is None:
            raise RuntimeError(f"the judge failed: {(run.stdout + run.stderr)[-300:]}")
        return took_s / int(counted[1])

    track_seconds.unit, track_seconds.type = "seconds", "time"
    track_seconds.pretty_name = "judge: seconds per clause"


class RankPool:
    """Seconds of two ranks on gloo: start and first case, another case, and a case after one in which a rank raised."""

    params = [PARTS]
    param_names = ["part"]
    version = "1"
    timeout = DEADLINE_S

    def setup(self, part):
        _require("pytest")
        # ROOT comes last: if the benchmarks run in another folder, impl is imported from that folder.
        sys.path.append(str(ROOT))

    def track_seconds(self, part):
        with _pool() as pool:
            start_s = _seconds(lambda: pool.run(f"{CASE}:healthy"))
            if part == "start":
                return start_s
            if part == "warm case":
                return statistics.median(
                    _seconds(lambda: pool.run(f"{CASE}:healthy")) for _ in range(WARM_CASES)
                )
            return statistics.median(_rebuild_s(pool) for _ in range(3))

    track_seconds.unit, track_seconds.type = "seconds", "time"
    track_seconds.pretty_name = "judge: seconds of a pool of two ranks"


@contextmanager
def _pool() -> Iterator:
    from conformance.ranks.pool import RankPool as Pool  # noqa: PLC0415 (imports modules that only the judge needs)

    with Pool(2) as pool:
        yield pool


def _rebuild_s(pool) -> float:
    from conformance.judge.rank_errors import RankFault  # noqa: PLC0415

    try:
        pool.run(f"{CASE}:raises", where=0)
    except RankFault:
        return _seconds(lambda: pool.run(f"{CASE}:healthy"))
    raise RuntimeError("a rank raised, but the pool reported no error")


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise NotImplementedError(f"the judge needs {package}, which is not installed here")
