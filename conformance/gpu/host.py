"""The machine and its versions, queried in a separate process because a broken driver may hang the query."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import describe_machine, own_name
from conformance.gpu.phase_rows import PhaseTask, Rows, in_words, serve
from conformance.judge.sandbox import environment


def work(task: PhaseTask, rows: Rows) -> None:
    rows.plan(["host"])
    cuda = torch.cuda.is_available()
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())] if cuda else []
    about: dict[str, Any] = {
        "machine": describe_machine(task.machine or own_name(), gpus[0]["name"] if gpus else "none"),
        "environment": environment.describe(),
        "cuda": cuda,
        "cores_here": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "cudnn": _version(torch.backends.cudnn.version),
        "nccl": _version(torch.cuda.nccl.version),  # pyright: ignore[reportAttributeAccessIssue]
    }
    rows.add("host", "seen", gpus[0]["name"] if gpus else "no GPU", **about)


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
    }


def _version(ask: Callable[[], Any]) -> str:
    try:
        version = ask()
    except Exception as error:  # a build without the library; the rest is still worth knowing
        return f"unknown ({in_words(error)[:80]})"
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


if __name__ == "__main__":
    serve(work)
