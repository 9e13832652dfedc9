"""Import time of impl after torch is imported. The ratio is impl's import time ÷ torch's."""

import importlib
import importlib.util
import statistics
import subprocess
import sys
from typing import Any

from benchmarks import comparison
from benchmarks.common import SUBJECTS
from benchmarks.timing import FEWEST_PAIRS, FULL, Effort, Paired, Workload, summary

# The program prints the seconds of both imports.
PROGRAM = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import {subject}.amp, {subject}.nn.utils
print(middle - start, time.perf_counter() - middle)
"""
DEADLINE_S = 120


def import_seconds(subject: str, times: int) -> tuple[list[float], list[float]]:
    """Return the import seconds of the subject after torch, and of torch, from `times` fresh processes.

    The modules are imported in this process first, to fill the file caches.
    """
    if subject == "torch":
        raise NotImplementedError("nothing is left to import after torch")
    for module in (subject, f"{subject}.amp", f"{subject}.nn", f"{subject}.nn.utils"):
        if importlib.util.find_spec(module) is None:
            raise NotImplementedError(f"there is no module {module}")
        importlib.import_module(module)
    command = [sys.executable, "-c", PROGRAM.format(subject=subject)]
    pairs: list[tuple[float, float]] = []
    for _ in range(times):
        run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if run.returncode:
            raise RuntimeError(f"importing failed: {run.stderr.strip().splitlines()[-1]}")
        torch_s, impl_s = map(float, run.stdout.split())
        pairs.append((impl_s, torch_s))
    return [subject_s for subject_s, _ in pairs], [torch_s for _, torch_s in pairs]


class RatioImport(comparison.Ratio):
    title = "import after torch"
    area, curve = "One-off work", "import"
    params = [["cpu"]]
    param_names = ["device"]
    is_one_off = True

    @staticmethod
    def workload(subject: str, *case: Any) -> Workload:
        raise NotImplementedError("both imports are timed in one fresh process, see measure")

    @classmethod
    def measure(cls, case: tuple[Any, ...], effort: Effort, subject: str = "impl") -> Paired:
        return summary(*import_seconds(subject, 15 if effort == FULL else FEWEST_PAIRS))

    def setup_cache(self):
        return self.measure_all()


class Import:
    params = [SUBJECTS]
    param_names = ["subject"]
    version = "1"

    def setup_cache(self):
        impl_s, torch_s = import_seconds("impl", 5)
        return {"impl": statistics.median(impl_s), "torch": statistics.median(torch_s)}

    def track_seconds(self, seconds, subject):
        return seconds[subject]

    track_seconds.unit, track_seconds.type = "seconds", "time"
    track_seconds.pretty_name = "import after torch: seconds"
