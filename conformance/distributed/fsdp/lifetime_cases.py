"""Cases of objects that outlive a model, and of modules that are called without inputs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from conformance.distributed.fsdp.fsdp_cases import gathered_gradients
from conformance.distributed.fsdp.lab import Lab


class Passing(nn.Linear):
    """Linear layer that also returns its input."""

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), input


class Taking(nn.Linear):
    def forward(self, input: Any) -> torch.Tensor:
        return super().forward(input[0])


def left_behind(lab: Lab, *, use_orig_params: bool, returns_input: bool = False) -> list[str]:
    """Return the modules and parameters that survive after a trained model was dropped.

    The model's input stays alive.
    """
    first, second = (Passing, Taking) if returns_input else (nn.Linear, nn.Linear)
    inner = lab.wrap(first(3, 4), use_orig_params=use_orig_params)
    model = lab.wrap(nn.Sequential(inner, second(4, 2)), use_orig_params=use_orig_params)
    x = torch.ones(1, 3, requires_grad=returns_input)
    for _ in range(2):
        model(x).sum().backward()
    held = {name: weakref.ref(item) for name, item in (*model.named_modules(), *model.named_parameters())}
    del model, inner
    gc.collect()
    return [name for name, reference in held.items() if reference() is not None]


class Constant(nn.Module):
    """Module whose forward takes no input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))

    def forward(self) -> torch.Tensor:
        return self.weight.square()


def called_without_inputs(lab: Lab, *, strategy: str) -> list[Any]:
    model = lab.wrap(Constant(), strategy=strategy)
    output = model()
    output.sum().backward()
    return [output.detach(), gathered_gradients(lab.library, model)]
