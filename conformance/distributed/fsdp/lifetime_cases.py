"""What outlives a model, and modules that are called without anything."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import FSDP, gathered_gradients
from conformance.judge.library import load_library
from conformance.judge.outcome import Outcome, observe
from conformance.ranks import Rank


class Passing(nn.Linear):
    """Returns what it was given, too."""

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), input


class Taking(nn.Linear):
    def forward(self, input: Any) -> torch.Tensor:
        return super().forward(input[0])


def left_behind(rank: Rank, *, library: str, use_orig_params: bool, returns_input: bool = False) -> Outcome:
    """The modules and parameters of a trained model that are still there when nobody holds it, but for its input."""
    fsdp = load_library(library).find(FSDP)

    def run() -> list[str]:
        def wrap(module: nn.Module) -> nn.Module:
            return fsdp(module, device_id=torch.device("cpu"), use_orig_params=use_orig_params)

        first, second = (Passing, Taking) if returns_input else (nn.Linear, nn.Linear)
        model = wrap(nn.Sequential(wrap(first(3, 4)), second(4, 2)))
        x = torch.ones(1, 3, requires_grad=returns_input)
        for _ in range(2):
            model(x).sum().backward()
        held = {name: weakref.ref(one) for name, one in (*model.named_modules(), *model.named_parameters())}
        del model
        gc.collect()
        return [name for name, reference in held.items() if reference() is not None]

    return observe(run)


class Constant(nn.Module):
    """Takes no input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))

    def forward(self) -> torch.Tensor:
        return self.weight.square()


def called_without_inputs(rank: Rank, *, library: str, strategy: str) -> Outcome:
    found = load_library(library)

    def run() -> Any:
        strategies = found.distributed.fsdp.ShardingStrategy
        model = found.find(FSDP)(
            Constant(), sharding_strategy=strategies[strategy], device_id=torch.device("cpu")
        )
        output = model()
        output.sum().backward()
        return [output.detach(), gathered_gradients(found, model)]

    return observe(run)
