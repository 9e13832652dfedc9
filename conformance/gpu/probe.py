"""Probe which collectives work between ranks here, and whether torch's own FSDP trains. Each has its own processes.

Two ranks on one GPU have gloo, which may lack collectives for CUDA tensors, and NCCL if each rank passes for a separate
host.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from conformance.gpu.phase_rows import PhaseTask, Rows, in_words, serve
from conformance.gpu.probed_operations import COLLECTIVES, TRAININGS, expected
from conformance.ranks import PoolBroken, RankDied, RankHung, RankPool, RankRaised

_START_S, _CASE_S = 12.0, 8.0  # together the deadline of a probe
# The first probe of a backend gets this much for its start and for its case, because libraries are loaded.
_FIRST_S = 30.0
_SERVER_START_S = 60.0
_AT_ONCE = 8
_OUTCOMES = {RankRaised: "raises", RankDied: "dies", RankHung: "hangs", PoolBroken: "does not come up"}


@dataclass(frozen=True)
class Probe:
    operation: str  # a collective or a training
    device: str
    backend: str
    world_size: int

    @property
    def name(self) -> str:
        return f"{self.operation} of {self.world_size} {self.device} {self.backend}"


def probes(device: str, gpus: int) -> Iterator[Probe]:
    """Yield all probes. The first probe of a group starts its backend. On one GPU, two ranks share it."""
    groups = [("gloo", 2)]
    if device == "cuda":
        groups += [("nccl", size) for size in sorted({1, 2, max(gpus, 1)})]
    for backend, world_size in groups:
        for operation in (*COLLECTIVES, *TRAININGS):
            yield Probe(operation, device, backend, world_size)


def outcome_of(probe: Probe, start_s: float = _START_S, case_s: float = _CASE_S) -> tuple[str, str]:
    """Return the outcome of the probe, and a text about it."""
    case = TRAININGS.get(probe.operation, probe.operation)
    try:
        with RankPool(probe.world_size, device=probe.device, backend=probe.backend, start_s=start_s) as pool:
            actual = pool.run(f"conformance.gpu.probed_operations:{case}", deadline_s=case_s)
    except Exception as error:
        kind = next((kind for kind in _OUTCOMES if isinstance(error, kind)), None)
        return ("fails", in_words(error)) if kind is None else (_OUTCOMES[kind], str(error))
    due = expected(probe.operation, probe.world_size)
    is_right = all(
        len(received) == len(expected_tensors)
        and all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            for a, b in zip(received, expected_tensors, strict=True)
        )
        for received, expected_tensors in zip(actual, due, strict=True)
    )
    return ("works", "") if is_right else ("wrong", f"got {actual}, expected {due}")


def work(task: PhaseTask, rows: Rows) -> None:
    gpus = torch.cuda.device_count() if task.device == "cuda" else 0
    todo = list(probes(task.device, gpus))
    rows.plan(probe.name for probe in todo)
    # The first pool also starts the server that all ranks are forked from, which imports torch.
    with RankPool(1, start_s=min(_SERVER_START_S, rows.left_s)) as pool:
        pool.run("conformance.gpu.probed_operations:barrier")
    first = [probe for probe in todo if probe.operation == COLLECTIVES[0]]
    _run_all(first, rows, _FIRST_S, _FIRST_S)
    _run_all([probe for probe in todo if probe not in first], rows, _START_S, _CASE_S)


def _run_all(todo: Sequence[Probe], rows: Rows, start_s: float, case_s: float) -> None:
    def found(probe: Probe) -> tuple[str, str] | None:
        left_s = rows.left_s
        return outcome_of(probe, min(start_s, left_s), min(case_s, left_s)) if left_s > 0 else None

    at_once = max(1, min(_AT_ONCE, len(os.sched_getaffinity(0)) // 2))
    with concurrent.futures.ThreadPoolExecutor(at_once) as executor:
        running = {executor.submit(found, probe): probe for probe in todo}
        for future in concurrent.futures.as_completed(running):
            probe, outcome = running[future], future.result()
            if outcome is not None:
                rows.add(probe.name, *outcome, **asdict(probe))


if __name__ == "__main__":
    serve(work)
