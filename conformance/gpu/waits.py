"""Call every function that is documented not to synchronise, while torch raises on a synchronisation.

torch raises on copies that block and on values that are read. The profiler counts the waits that torch does not detect:
waits for a stream, an event or the device.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from benchmarks.timing import Workload
from conformance.gpu.bandwidth import limit_threads
from conformance.gpu.launches import counted
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, in_words, serve
from conformance.gpu.sync_free_calls import CASES, WaitCase
from conformance.ranks.fake_group import fake_group

_WARM_UPS, _CALLS = 5, 3  # a graph captures a step once its tensors do not move
_FRAMES = 8


def work(task: PhaseTask, rows: Rows) -> None:
    limit_threads(task.device)
    rows.run({case.name: partial(_judged, case, task.device) for case in CASES})


def _judged(case: WaitCase, device: str) -> Result:
    return *outcome_of(case, device), {"covers": case.covers}


def outcome_of(case: WaitCase, device: str) -> tuple[str, str]:
    try:
        with fake_group() if case.needs_group else nullcontext():
            return _outcome_of(case, device)
    except Exception as error:  # the other calls are still worth making
        stack = "".join(traceback.format_tb(error.__traceback__)[-_FRAMES:])
        return "failed", f"{in_words(error)}\n{stack}"


def _outcome_of(case: WaitCase, device: str) -> tuple[str, str]:
    call = case.make(device)
    for _ in range(_WARM_UPS):
        returned = call()
    if device != "cuda":
        return "not available", "torch reports synchronisations on CUDA only; the call ran"
    torch.cuda.synchronize()
    with _raising_on_synchronisation():
        for _ in range(_CALLS):
            returned = call()
    waits = counted(Workload(call), device)["synchronisations"]
    if waits:
        return "failed", f"the host waits {waits} times for a stream, an event or the device"
    return "agrees", returned if isinstance(returned, str) else ""


@contextmanager
def _raising_on_synchronisation() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


if __name__ == "__main__":
    serve(work)
