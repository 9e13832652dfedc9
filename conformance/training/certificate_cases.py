"""Recorded trainings that ranks run."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from conformance.judge.library import load_library
from conformance.ranks import Rank
from conformance.training.certificate import Recorder

BATCH = 8


def train(
    rank: Rank, *, folder: str, sharding: str | None, mistake: tuple[int, int] | None = None, steps: int = 3
) -> None:
    """Train a small model on this rank's part of each batch, and write a certificate.

    Args:
        sharding: a function or class of `distributed.fsdp`, or None for a model that is not sharded.
        mistake: a rank and a step after which it changes its part of a weight.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(13, 31), nn.Tanh(), nn.Linear(31, 7))
    if sharding:
        shard = load_library("torch").find(f"distributed.fsdp.{sharding}")
        is_flat = sharding == "FullyShardedDataParallel"
        model = shard(
            model, **({"use_orig_params": True, "device_id": torch.device("cpu")} if is_flat else {})
        )
    # AdamW has two states, which FullyShardedDataParallel.optim_state_dict of torch mixes up.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    recorder = Recorder(folder, model, optimizer)
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
