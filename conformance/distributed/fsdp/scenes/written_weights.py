"""Writes to parameters and gradients between two calls of the model, with and without sharding.

Without sharding, one process runs the data of all ranks and averages their losses. A rank runs its own data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import gathered_parameters
from conformance.distributed.fsdp.scenes.scene import Scene, filled


class Forked(nn.Module):
    """Model with two inner units, of which one is only used if `forks`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.always = nn.Sequential(nn.Linear(4, 5))
        self.sometimes = nn.Sequential(nn.Linear(4, 5))
        filled(self)

    def forward(self, x: torch.Tensor, forks: bool = False) -> torch.Tensor:
        hidden = self.body(x).tanh()
        return self.always(hidden) + self.sometimes(hidden) if forks else self.always(hidden)


@dataclass(frozen=True)
class WritingTrainer:
    """Model, which may be sharded, and the ranks whose data it gets."""

    model: nn.Module
    ranks: Sequence[int]
    unsynced: Callable[[], contextlib.AbstractContextManager[None]]

    def loss(self, number: int, *, forks: bool = True) -> torch.Tensor:
        inputs = [torch.linspace(0, 1 + number, 15).view(5, 3) - rank * 0.25 for rank in self.ranks]
        losses = [self.model(x, forks).square().mean() / len(inputs) for x in inputs]
        return torch.stack(losses).sum()

    def backward(self, number: int, *, forks: bool = True) -> None:
        self.loss(number, forks=forks).backward()

    def step(self, *, of: str = "", fused: bool = False) -> None:
        """Step the parameters whose names contain `of` with torch's SGD, and clear all gradients."""
        stepped = [parameter for name, parameter in self.model.named_parameters() if of in name]
        torch.optim.SGD(stepped, 0.25, fused=fused).step()
        self.model.zero_grad()

    def output(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.ones(1, 3), forks=True)


Does = Callable[[WritingTrainer], list[torch.Tensor]]
Makes = Callable[[], nn.Module]


def written(
    scene: Scene, *, does: Does, strategy: str, use_orig_params: bool, makes: Makes = Forked
) -> dict[str, Any]:
    """Run `does` on a sharded model. Return the outputs and the full parameters at the end."""
    model = scene.wrap(makes(), strategy=strategy, units=[nn.Sequential], use_orig_params=use_orig_params)
    outputs = does(WritingTrainer(model, [scene.rank.rank], model.no_sync))
    return {"outputs": outputs, "whole": gathered_parameters(scene.library, model)}


def written_without_sharding(does: Does, ranks: int, makes: Makes = Forked) -> dict[str, Any]:
    model = makes()
    outputs = does(WritingTrainer(model, range(ranks), contextlib.nullcontext))
    return {
        "outputs": outputs,
        "whole": {name: parameter.detach() for name, parameter in model.named_parameters()},
    }
