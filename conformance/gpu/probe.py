"""Which collectives work between ranks here, and whether torch's own FSDP trains on them. Each in its own processes.

Several ranks on one GPU have no backend but gloo, which torch promises little of for CUDA tensors; it has crashed.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from conformance.gpu.phase_rows import PhaseTask, Rows, in_words, serve
from conformance.gpu.probe_cases import COLLECTIVES, expected
from conformance.ranks import PoolBroken, RankDied, RankHung, RankPool, RankRaised

_START_S, _CASE_S = 12.0, 8.0  # together the deadline of a probe
_FIRST_START_S = 60.0
_AT_ONCE = 4
_OUTCOMES = {RankRaised: "raises", RankDied: "dies", RankHung: "hangs", PoolBroken: "does not come up"}


@dataclass(frozen=True)
class Probe:
    what: str  # a collective, or fsdp
    device: str
    backend: str
    world_size: int

    @property
    def name(self) -> str:
        return f"{self.what} of {self.world_size} {self.device} {self.backend}"


def probes(device: str, gpus: int) -> Iterator[Probe]:
    """All there are, those first on which most depends."""
    groups = [("gloo", 2)]
    if device == "cuda":
        groups += [("nccl", size) for size in sorted({1, min(2, gpus), gpus})]
    for backend, world_size in groups:
        for what in (*COLLECTIVES, "fsdp"):
            yield Probe(what, device, backend, world_size)


def outcome_of(probe: Probe) -> tuple[str, str]:
    """What it came to, and in what words."""
    try:
        with RankPool(probe.world_size, device=probe.device, backend=probe.backend, start_s=_START_S) as pool:
            actual = pool.run(f"conformance.gpu.probe_cases:{probe.what}", deadline_s=_CASE_S)
    except Exception as error:
        kind = next((kind for kind in _OUTCOMES if isinstance(error, kind)), None)
        return ("fails", in_words(error)) if kind is None else (_OUTCOMES[kind], str(error))
    due = expected(probe.what, probe.world_size)
    is_right = all(
        len(mine) == len(theirs)
        and all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(actual, due, strict=True)
    )
    return ("works", "") if is_right else ("wrong", f"got {actual}, expected {due}")


def work(task: PhaseTask, rows: Rows) -> None:
    gpus = torch.cuda.device_count() if task.device == "cuda" else 0
    todo = list(probes(task.device, gpus))
    rows.plan(probe.name for probe in todo)
    # The first pool also starts the server that all ranks are forked from, which imports torch.
    with RankPool(1, start_s=min(_FIRST_START_S, rows.left_s)) as pool:
        pool.run("conformance.gpu.probe_cases:barrier")
    at_once = max(1, min(_AT_ONCE, len(os.sched_getaffinity(0)) // 2))
    with concurrent.futures.ThreadPoolExecutor(at_once) as executor:
        running = {executor.submit(_in_time, probe, rows): probe for probe in todo}
        for future in concurrent.futures.as_completed(running):
            probe, found = running[future], future.result()
            if found is not None:
                rows.add(probe.name, *found, **asdict(probe))


def _in_time(probe: Probe, rows: Rows) -> tuple[str, str] | None:
    return outcome_of(probe) if rows.left_s > 0 else None


if __name__ == "__main__":
    serve(work)
