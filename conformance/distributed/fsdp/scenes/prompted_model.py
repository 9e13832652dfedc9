"""Model that passes an activation and its own parameter to a unit with regions of reentrant checkpointing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from conformance.distributed.fsdp.scenes.scene import Scene


class Regions(nn.Module):
    """Module that computes with one weight in two regions, of which only the second is checkpointed if `is_mixed`."""

    def __init__(self, is_mixed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.is_mixed = is_mixed

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        first = self.region(x) if self.is_mixed else checkpoint(self.region, x, use_reentrant=True)
        return first * checkpoint(self.region, prompt, use_reentrant=True)

    def region(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight).tanh()


class Prompted(nn.Module):
    def __init__(self, is_mixed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.prompt = nn.Parameter(torch.empty(2, 3))
        self.regions = Regions(is_mixed)

    def forward(self, x: Tensor) -> Tensor:
        return self.regions(self.first(x), self.prompt)


def backward(scene: Scene, model: nn.Module) -> None:
    def loss(rank: int) -> Tensor:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64, device=scene.rank.device).view(2, 3)
        return model(x * (rank + 2)).square().mean()

    scene.mean(loss).backward()
