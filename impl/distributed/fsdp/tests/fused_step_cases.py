"""`fused_step` of parameters that an accelerator offloads to the host, as a case of a pool."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import Rank
from impl.amp import GradScaler
from impl.distributed.fsdp import CPUOffloadPolicy, fully_shard


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
