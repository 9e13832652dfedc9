"""`fused_step` of sharded parameters: the types of states, and the backends of offloaded parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from conformance.distributed.fsdp.test_scale import world_of
from conformance.ranks import Rank, RankPool
from conformance.ranks.fixtures import require_simulator
from conformance.simulator import NAME
from impl.amp import GradScaler
from impl.distributed.fsdp import CPUOffloadPolicy, fully_shard

pytestmark = pytest.mark.deadline(300)


@pytest.fixture
def late_rank() -> Iterator[RankPool]:
    require_simulator()
    with RankPool(1, device=NAME, start_s=240) as pool:
        yield pool


def test_momentum_of_dtensor_is_dtensor() -> None:
    with world_of(2):
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), GradScaler("cpu")
        for _ in range(2):
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.fused_step(optimizer)
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        assert [(type(momentum), momentum.shape) for momentum in momenta] == [
            (DTensor, param.shape) for param in model.parameters()
        ]


def offloaded(rank: Rank) -> Any:
    """Return the backends of three steps, the second of which has gradients with inf, and the scales after them."""
    mesh = init_device_mesh(rank.device.type, (1,))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.125)
    scaler = GradScaler(rank.device.type, init_scale=64.0)
    scales: list[float] = []
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4, device=rank.device)).sum() * factor).backward()
        scaler.fused_step(optimizer)
        scales.append(scaler.get_scale())
    return sorted({entry.backend for entry in scaler.explain(optimizer).parameters}), scales


def test_offloaded_parameters_are_updated_by_library(late_rank: RankPool) -> None:
    [(backends, scales)] = late_rank.run(offloaded, deadline_s=120)
    assert backends == ["native"]
    assert scales == [64.0, 32.0, 32.0]
