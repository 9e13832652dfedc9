"""The suite as a phase: how pytest is started."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from conformance.gpu.phase_rows import VARIABLE, PhaseTask

_PLUGIN = "conformance.gpu.judge_plugin"
_WORKERS_PER_GPU = 8


def workers(device: str, cores: int, gpus: int) -> int:
    """How many processes judge at once.

    Without a GPU one a core. With one, half as many, because a test with ranks keeps two processes busy and each CUDA
    process has threads of its own; and at most eight a GPU: processes take turns on it, and each holds half a gigabyte
    of it for its context, the ranks that it keeps warm another one each.
    """
    return cores if device == "cpu" else max(1, min(cores // 2, _WORKERS_PER_GPU * max(gpus, 1)))


def command(task: PhaseTask, gpus: int) -> list[str]:
    words = [sys.executable, "-m", "pytest", *shlex.split(task.tests), "-q", "--tb=short", "-p", _PLUGIN]
    if find_spec("xdist") is not None:
        words += ["-n", str(workers(task.device, len(os.sched_getaffinity(0)), gpus))]
    words += [f"--subject={task.subject}", f"--profile={task.profile}", "--world-sizes=1,2"]
    words += ["--device=cpu" if task.device == "cpu" else "--device=cuda,cpu"]
    words += [] if task.seed is None else [f"--seed={task.seed}"]
    folder = Path(task.rows).with_suffix("")
    return [*words, f"--report={folder}", f"--junitxml={folder / 'junit.xml'}"]


def environ(task: PhaseTask) -> dict[str, str]:
    return {VARIABLE: task.as_word()}
