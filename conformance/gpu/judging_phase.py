"""The suite as a phase: how pytest is started."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from conformance.gpu.phase_rows import VARIABLE, PhaseTask

_PLUGIN = "conformance.gpu.judge_plugin"
# As in `conformance.ranks.pool`. That imports torch, but this process must not, because a broken driver may hang it.
_CUDA_BACKEND = "TANDEM_CUDA_RANKS"
_WORKERS_PER_GPU = 12
# A hang blocks a worker for this long. Without a GPU, the cores may be busy.
_DEADLINES_S = {"cuda": 40.0, "cpu": 120.0}


def workers(device: str, cores: int, gpus: int) -> int:
    """Return how many processes judge at once, unless `--workers` is given.

    Without a GPU: one a core. With a GPU: three for four cores, because each CUDA process has threads of its own, and
    at most 12 a GPU. Each process holds half a gigabyte of the GPU's memory for its context, and so does each rank
    that it keeps warm: 12 workers with pools of one and of two ranks take 25 GB.

    Tests with ranks need no other number. A pool holds a core for each rank while a CUDA case runs, so that 16 cores
    run 8 cases of two ranks at once, and the other workers wait for their turn.
    """
    return cores if device == "cpu" else max(1, min(cores * 3 // 4, _WORKERS_PER_GPU * max(gpus, 1)))


def command(task: PhaseTask, gpus: int) -> list[str]:
    words = [sys.executable, "-m", "pytest", *shlex.split(task.tests), "-q", "--tb=short", "-p", _PLUGIN]
    if find_spec("xdist") is not None:
        count = task.workers or workers(task.device, len(os.sched_getaffinity(0)), gpus)
        # In chunks of one test: larger chunks would give a worker tests of the end before others have run the first.
        words += ["-n", str(count), "--dist=load", "--maxschedchunk=1"]
    words += [f"--subject={task.subject}", f"--profile={task.profile}", "--world-sizes=1,2"]
    words += [f"--device={task.devices or task.device}", "--no-shrink"]
    words.append(f"--deadline={task.deadline_s or _DEADLINES_S[task.device]:g}")
    words += [] if task.seed is None else [f"--seed={task.seed}"]
    folder = Path(task.rows).with_suffix("")
    return [*words, f"--report={folder}", f"--junitxml={folder / 'junit.xml'}"]


def environ(task: PhaseTask) -> dict[str, str]:
    return {VARIABLE: task.as_word(), **({_CUDA_BACKEND: task.ranks} if task.ranks else {})}
