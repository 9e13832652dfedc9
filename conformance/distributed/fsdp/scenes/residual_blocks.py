"""A small residual model, and its batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.scenes.scene import Scene


class ResidualBlock(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x)).tanh()


def blocks(number: int = 3) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        return nn.Sequential(*(ResidualBlock() for _ in range(number))).double()


def batch_of(scene: Scene, number: int, rank: int | None = None) -> torch.Tensor:
    """Return the input of forward `number`, by default that of this rank."""
    batch = torch.linspace(-1, 1, 24, dtype=torch.float64, device=scene.rank.device)
    return batch.view(4, 6) * (1 + number + (scene.rank.rank if rank is None else rank))
