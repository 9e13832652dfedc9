"""Model with a unit that only some forwards use, and programs that write to it between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.scene import Scene, filled


class Forked(nn.Module):
    """Model with two inner units, of which one is only used if `forks`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.always = nn.Sequential(nn.Linear(4, 5))
        self.sometimes = nn.Sequential(nn.Linear(4, 5))

    def forward(self, x: Tensor, forks: bool = False) -> Tensor:
        hidden = self.body(x).tanh()
        return self.always(hidden) + self.sometimes(hidden) if forks else self.always(hidden)


def loss(scene: Scene, number: int, *, forks: bool = True) -> Tensor:
    """Return the mean loss of forward `number`."""

    def of_rank(rank: int) -> Tensor:
        x = torch.linspace(0, 1 + number, 15).view(5, 3) - rank * 0.25
        return scene.model(x, forks).square().mean()

    return scene.mean(of_rank)


def backward(scene: Scene, number: int, *, forks: bool = True) -> None:
    loss(scene, number, forks=forks).backward()


def step(scene: Scene, *, of: str = "", fused: bool = False) -> None:
    """Step the parameters whose names contain `of` with torch's SGD, and clear all gradients."""
    stepped = [parameter for name, parameter in scene.model.named_parameters() if of in name]
    torch.optim.SGD(stepped, 0.25, fused=fused).step()
    scene.model.zero_grad()


def output(scene: Scene) -> Tensor:
    with torch.no_grad():
        return scene.model(torch.ones(1, 3), forks=True)


Does = Callable[[Scene], list[Tensor]]


def run_sharded(
    scene: Scene, *, does: Does, strategy: str, use_orig_params: bool, makes: type[nn.Module] = Forked
) -> dict[str, Any]:
    """Run `does` on a sharded model. Return the outputs and the full parameters at the end."""
    wrapping = {"strategy": strategy, "use_orig_params": use_orig_params}
    scene.model = scene.wrap(filled(makes()), units=[nn.Sequential], **wrapping)
    return {"outputs": does(scene), "whole": scene.whole_parameters()}
