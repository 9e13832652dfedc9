"""Small modules that torch's FullyShardedDataParallel refuses or gets wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.scenes.fsdp_training import gathered_gradients, mesh_of
from conformance.distributed.fsdp.scenes.scene import Scene, filled

_BACKWARDS = 2


class Shifted(nn.Module):
    """Module with parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.shift = nn.Parameter(torch.zeros(5, 1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).double() + self.shift.sum()


class OneElement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Position(nn.Module):
    """Module that returns a slice of its parameter, which the outer module adds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 3))

    def forward(self, rows: int) -> torch.Tensor:
        return self.weight[:rows]


class Positioned(nn.Module):
    """Module that returns its result together with a slice of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.position = Position()
        self.last = nn.Linear(3, 2)
        self.added = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.both(x))

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(x + self.position(len(x))), self.added[: len(x)]


class Description:
    """Object that is not a container of torch or Python, with references to itself."""

    def __init__(self, mean: torch.Tensor, spread: torch.Tensor) -> None:
        self.parts = {"mean": mean}
        self.inner = _Spread(spread)
        self.itself = self
        self.circle: list[Any] = [self]
        self.circle.append(self.circle)

    def square(self) -> torch.Tensor:
        return (self.parts["mean"] * self.inner.spread).square()


@dataclass(frozen=True)
class _Spread:
    spread: torch.Tensor


class Describing(nn.Module):
    """Module that returns an object, which may hold a parameter."""

    def __init__(self, holds_parameter: bool) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.spread = nn.Parameter(torch.ones(2))
        self.holds_parameter = holds_parameter

    def forward(self, x: torch.Tensor) -> Description:
        spread = self.spread.expand(len(x), 2)
        return Description(self.mean(x), spread if self.holds_parameter else spread.exp())


class Described(nn.Module):
    """Module that computes with the contents of an object that its inner module returns."""

    def __init__(self, holds_parameter: bool) -> None:
        super().__init__()
        self.describing = Describing(holds_parameter)
        self.last = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.describing(x).square())


class Nothing(nn.Module):
    """Module whose parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def _half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


def _normed() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.utils.weight_norm(nn.Linear(3, 4))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "half frozen": _half_frozen,
    "several dtypes": Shifted,
    "one element": OneElement,
    "float64": lambda: nn.Linear(3, 4).double(),
    "plain": lambda: nn.Linear(3, 4),
    "normed": _normed,
    "returned": Positioned,
    "object": lambda: Describing(holds_parameter=False),
    "object with a parameter": lambda: Describing(holds_parameter=True),
    "object inside": lambda: Described(holds_parameter=False),
    "object inside with a parameter": lambda: Described(holds_parameter=True),
    "no elements": lambda: nn.Sequential(nn.Linear(3, 4), Nothing(), nn.Linear(4, 2)),
}


def built(module: str) -> Any:
    return filled(MODULES[module]())


def accumulated(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Run backwards that accumulate. Return their losses."""
    dtype = min((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
    losses = []
    for number in range(_BACKWARDS):
        x = torch.linspace(0, 1 + number, 15, dtype=dtype).view(5, 3) - rank * 0.25
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def accumulate(
    scene: Scene,
    *,
    module: str,
    replicas: str = "",
    clips: bool = False,
    on: str = "cpu",
    strategy: str = "FULL_SHARD",
) -> dict[str, Any]:
    """Accumulate gradients of a wrapped module. Inner modules with unusual parameters become units.

    `on` is the device that is passed, or empty. With `replicas`, each rank has a full replica, either by a `mesh` or by
    the `default` of a hybrid strategy.
    """
    arguments: dict[str, Any] = {"device_id": torch.device(on) if on else None}
    if replicas == "mesh":
        arguments["device_mesh"] = mesh_of(scene.rank, 1)
    else:
        arguments["units"] = [nn.Sequential] if replicas else [Position, Nothing, Describing]
    model = scene.wrap(built(module), strategy="HYBRID_SHARD" if replicas else strategy, **arguments)
    losses = accumulated(model, scene.rank.rank)
    norm = model.clip_grad_norm_(0.5) if clips else None
    return {"losses": losses, "norm": norm, "whole": gathered_gradients(scene.library, model)}


def output_of_an_inner_module(scene: Scene, *, module: str = "plain") -> torch.Tensor:
    """Call a module inside a unit by itself."""
    model = scene.wrap(nn.Sequential(built(module), nn.Linear(4, 2)), use_orig_params=True)
    return model.module[0](torch.ones(1, 3)).detach()
