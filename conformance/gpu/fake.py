"""Time training steps of sharded models on rank 0 of 8 fake ranks, beside torch's: all costs except communication.

The values are meaningless, because nothing is gathered from the other ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.common import SEED
from benchmarks.fsdp_ranks import SEQUENCES, TOKENS, WORDS, flat_sharded, fully_sharded
from benchmarks.timing import Effort, Workload, paired
from conformance.gpu.bandwidth import limit_threads
from conformance.gpu.launches import counted
from conformance.gpu.phase_rows import PhaseTask, Result, Rows, serve
from conformance.gpu.steps import host_seconds, times_of
from conformance.ranks.fake_group import WORLD_SIZE, fake_group

_EFFORT = {"cuda": Effort(pairs=20, least_pairs=5, budget_s=2.0), "cpu": Effort(pairs=3)}
_TOKENS = {"cuda": (SEQUENCES, TOKENS), "cpu": (1, 8)}


APIS: dict[str, Callable[..., nn.Module]] = {
    "FSDP": partial(flat_sharded, use_orig_params=True),
    "fully_shard": fully_sharded,
}


@dataclass(frozen=True)
class Sharded:
    step: Callable[[], None]
    peak_bytes: int | None  # device memory for shards and a step; None on the CPU


def work(task: PhaseTask, rows: Rows) -> None:
    limit_threads(task.device)
    rows.run({api: partial(_measured, api, task) for api in APIS})


def _measured(api: str, task: PhaseTask) -> Result:
    with fake_group():
        values = compared(api, task.subject, task.device)
    return "measured", _in_words(values), {"world_size": WORLD_SIZE, **values}


def compared(api: str, subject: str, device: str) -> dict[str, Any]:
    """Return the subject's times, host times, kernels and memory of a step, and torch's."""
    subject_model, torchs = (_sharded(api, library, device) for library in (subject, "torch"))
    works = Workload(subject_model.step), Workload(torchs.step)
    timed = paired(*works, device, _EFFORT[device])
    kernels = [counted(work, device)["kernels"] for work in works]
    host_s = [host_seconds(work, device) if device == "cuda" else None for work in works]
    return {
        **times_of(timed),
        "host_seconds": host_s[0],
        "torch_host_seconds": host_s[1],
        "kernels": kernels[0],
        "torch_kernels": kernels[1],
        "peak_bytes": subject_model.peak_bytes,
        "torch_peak_bytes": torchs.peak_bytes,
    }


def _sharded(api: str, subject: str, device: str) -> Sharded:
    gc.collect()
    cuda = device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    torch.manual_seed(SEED)
    model = APIS[api](subject, device="cuda:0" if cuda else device)
    words = torch.randint(0, WORDS, _TOKENS[device]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        logits = model(words)
        nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    if not cuda:
        return Sharded(step, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return Sharded(step, torch.cuda.max_memory_allocated() - before)


def _in_words(values: dict[str, Any]) -> str:
    times = values["seconds"] * 1e3, values["torch_seconds"] * 1e3
    text = f"{values['ratio']:.3f} × torch ({times[0]:.2f} and {times[1]:.2f} ms)"
    if values["host_seconds"] is not None:
        text += f", host {values['host_seconds'] * 1e3:.2f} and {values['torch_host_seconds'] * 1e3:.2f} ms"
    if values["kernels"] is not None:
        text += f", {values['kernels']} and {values['torch_kernels']} kernels"
    if values["peak_bytes"] is not None:
        peaks = values["peak_bytes"] / 2**20, values["torch_peak_bytes"] / 2**20
        text += f", at most {peaks[0]:.1f} and {peaks[1]:.1f} MiB"
    return text


if __name__ == "__main__":
    serve(work)
