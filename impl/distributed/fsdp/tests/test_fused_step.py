"""`fused_step` of sharded parameters: the types of states."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from conformance.distributed.fsdp.test_scale import world_of
from impl.amp import GradScaler
from impl.distributed.fsdp import fully_shard

pytestmark = pytest.mark.deadline(300)


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
