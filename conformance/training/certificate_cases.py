"""Recorded trainings that ranks run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from conformance.judge.library import load_library
from conformance.ranks import Rank
from conformance.training.certificate import RunRecorder

BATCH = 8


WRAPPINGS: dict[str, Callable[[nn.Module, Callable[[nn.Module], nn.Module]], Any]] = {
    "plain": lambda model, shard: shard(model),
    "compiled": lambda model, shard: torch.compile(shard(model), backend="eager"),
    "inner": lambda model, shard: nn.Sequential(*(shard(layer) for layer in model.children())),
}


def train(
    rank: Rank,
    *,
    folder: str,
    sharding: str | None,
    mistake: tuple[int, int] | None = None,
    steps: int = 3,
    wrapping: str = "plain",
    normalizes: bool = False,
) -> None:
    """Train a small model on this rank's part of each batch, and write a certificate.

    Args:
        sharding: a function or class of `distributed.fsdp`, or None for a model that is not sharded.
        mistake: a rank and a step after which it changes its part of a weight.
        wrapping: one of `WRAPPINGS`.
        normalizes: the model has statistics of this rank's batches.
    """
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(31) if normalizes else nn.Tanh()
    model: nn.Module = nn.Sequential(nn.Linear(13, 31), middle, nn.Linear(31, 7))
    if sharding:
        shard = load_library("torch").find(f"distributed.fsdp.{sharding}")
        is_flat = sharding == "FullyShardedDataParallel"
        options = {"use_orig_params": True, "device_id": torch.device("cpu")} if is_flat else {}
        model = WRAPPINGS[wrapping](model, lambda module: shard(module, **options))
    # AdamW has two states, which FullyShardedDataParallel.optim_state_dict of torch mixes up.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    recorder = RunRecorder(folder, model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        inputs = torch.randn(BATCH, 13, generator=generator).chunk(rank.world_size)[rank.rank]
        loss = model(inputs).square().mean()
        loss.backward()
        recorder.record("backward", loss=loss)
        optimizer.step()
        if mistake == (rank.rank, step):
            weight = next(model.parameters()).detach()
            with contextlib.suppress(AttributeError):
                weight = weight.to_local()
            weight.mul_(1.001)
        recorder.record("step")
        optimizer.zero_grad()
