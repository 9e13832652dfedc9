"""Modules that are called without arguments, and resources that remain after a model is deleted."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.scene import Scene, survivors
from conformance.distributed.fsdp.scenes.twins import Twins, each, each_strategy
from conformance.judge.clauses import clause
from conformance.judge.tolerances import TRAINED

nothing, something = each(lambda left: left == []), each(bool)


class Constant(nn.Module):
    """Module whose forward takes no input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))

    def forward(self) -> torch.Tensor:
        return self.weight.square()


def called_without_inputs(scene: Scene, *, strategy: str) -> list[Any]:
    model = scene.wrap(Constant(), strategy=strategy)
    output = model()
    output.sum().backward()
    return [output.detach(), scene.whole_gradients(model)]


@clause("distributed.fsdp.fully_sharded_data_parallel.without_inputs")
@each_strategy
def test_module_without_inputs_trains(twins: Twins, strategy: str) -> None:
    twins.agree(called_without_inputs, tolerance=TRAINED, strategy=strategy)


class Passing(nn.Linear):
    """Linear layer that also returns its input."""

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), input


class Taking(nn.Linear):
    def forward(self, input: Any) -> torch.Tensor:
        return super().forward(input[0])


def left_behind(scene: Scene, *, use_orig_params: bool, returns_input: bool = False) -> list[str]:
    """Return the modules and parameters that survive after a trained model was dropped.

    The model's input stays alive.
    """
    first, second = (Passing, Taking) if returns_input else (nn.Linear, nn.Linear)
    inner = scene.wrap(first(3, 4), use_orig_params=use_orig_params)
    model = scene.wrap(nn.Sequential(inner, second(4, 2)), use_orig_params=use_orig_params)
    x = torch.ones(1, 3, requires_grad=returns_input)
    for _ in range(2):
        model(x).sum().backward()
    refs = {name: weakref.ref(item) for name, item in (*model.named_modules(), *model.named_parameters())}
    del model, inner
    return survivors(refs)


@clause("distributed.fsdp.fsdp_torch_limit_removed.freed")
@pytest.mark.world_sizes(fewest=2)
def test_original_parameters_are_freed_with_model(cpu_twins: Twins) -> None:
    outcomes = cpu_twins.of_subject(left_behind, use_orig_params=True)
    assert nothing(outcomes), outcomes


@clause("distributed.fsdp.fsdp_torch_limit_removed.freed")
@pytest.mark.deviation("fsdp.models_are_freed")
def test_flat_parameters_are_freed_with_model(cpu_twins: Twins) -> None:
    cpu_twins.deviate(left_behind, use_orig_params=False, torch_does=something, we_do=nothing)


@clause("distributed.fsdp.fsdp_torch_limit_removed.freed")
@pytest.mark.deviation("fsdp.models_are_freed")
@pytest.mark.world_sizes(fewest=2)
def test_returned_input_keeps_no_model_alive(cpu_twins: Twins) -> None:
    arguments = {"use_orig_params": True, "returns_input": True}
    cpu_twins.deviate(left_behind, **arguments, torch_does=something, we_do=nothing)
