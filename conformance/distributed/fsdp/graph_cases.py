"""Cases of a backward whose graph was built before an optimizer step."""

from __future__ import annotations

import torch
from torch import nn

from conformance.distributed.fsdp.written_cases import WritingTrainer


class Scale(nn.Sequential):
    """Unit with a single element, which only one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.factor


def _filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view(parameter.shape))
    return module


class Parted(nn.Module):
    """Model with two paths that share no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Scale(), nn.Linear(4, 2)) for _ in range(2)
        )
        _filled(self)

    def forward(self, x: torch.Tensor, forks: bool) -> torch.Tensor:
        return self.first(x) if forks else self.second(x)


class PartlyRead(nn.Module):
    """Model whose inner unit has a weight that backward reads and one that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), Scale())
        _filled(self)

    def forward(self, x: torch.Tensor, forks: bool) -> torch.Tensor:
        return self.inner(x) if forks else self.inner[0](x).sin()


def stepped_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    before = trainer.loss(0)
    trainer.backward(1)
    trainer.step()
    before.backward()
    trainer.step()
    return [trainer.output()]


def stepped_between_by_a_fused_optimizer(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Step between a forward and its backward with a fused optimizer, which changes no version counter."""
    before = trainer.loss(0)
    trainer.backward(1)
    trainer.step(fused=True)
    before.backward()
    trainer.step()
    return [trainer.output()]


def evaluated_between(trainer: WritingTrainer) -> list[torch.Tensor]:
    before = trainer.loss(0)
    trainer.backward(1)
    trainer.step()
    output = trainer.output()
    before.backward()
    trainer.step()
    return [output, trainer.output()]


def goes_on_after_the_error(trainer: WritingTrainer) -> list[torch.Tensor]:
    try:
        stepped_between(trainer)
    except RuntimeError:
        trainer.model.zero_grad()
    trainer.backward(2)
    trainer.step()
    return [trainer.output()]


def stepped_elsewhere(trainer: WritingTrainer) -> list[torch.Tensor]:
    """Run a backward whose graph reads no parameter that the step has changed."""
    before = trainer.loss(0, forks=True)
    trainer.backward(1, forks=False)
    trainer.step()
    before.backward()
    trainer.step()
    return [trainer.output()]


def stepped_what_is_not_read(trainer: WritingTrainer) -> list[torch.Tensor]:
    before = trainer.loss(0)
    trainer.backward(1)
    trainer.step(of="0.weight")
    before.backward()
    trainer.step()
    return [trainer.output()]
