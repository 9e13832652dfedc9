"""Parameters without elements, which torch's class does not train and does not save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import Twins, each, each_strategy, raises
from conformance.judge.clauses import clause


class Nothing(nn.Module):
    """Module whose parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def _backward(scene: Scene, model: nn.Module) -> None:
    scene.mean(
        lambda rank: model(torch.linspace(0, 1, 15).view(5, 3) - rank * 0.25).square().mean()
    ).backward()


def accumulate(scene: Scene, strategy: str) -> dict[str, torch.Tensor]:
    """Return the gradients of two backwards. The module without elements is a unit."""
    whole = nn.Sequential(nn.Linear(3, 4), Nothing(), nn.Linear(4, 2))
    model = scene.wrap(filled(whole), strategy=strategy, units=[Nothing])
    _backward(scene, model)
    _backward(scene, model)
    return scene.whole_gradients(model)


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_elements")
@pytest.mark.deviation("fsdp.without_elements")
@each_strategy
def test_unit_without_elements_trains(cpu_twins: Twins, strategy: str) -> None:
    cpu_twins.deviate_to_unsharded(
        accumulate, strategy=strategy, torch_does=raises(AssertionError, "unsharded_end_idx")
    )


def states_without_elements(scene: Scene, strategy: str) -> dict[str, Any]:
    """Return the shapes of gradients and the names of saved states. The last parameter has no elements."""
    whole = nn.Sequential(nn.Linear(3, 4), Nothing())
    model = scene.wrap(filled(whole), strategy=strategy, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    _backward(scene, model)
    gradients = [
        parameter.grad is not None and tuple(parameter.grad.shape) for parameter in model.parameters()
    ]
    optimizer.step()
    saved = scene.fsdp.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(scene.fsdp.optim_state_dict_to_load(model, optimizer, saved))
    return {"gradients": gradients, "saved": sorted(saved["state"])}


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_elements")
@pytest.mark.deviation("fsdp.without_elements")
def test_last_unsharded_parameter_may_have_no_elements(cpu_twins: Twins) -> None:
    expected = {"gradients": [(4, 3), (4,), (0, 4)], "saved": ["0.bias", "0.weight", "1.weight"]}
    cpu_twins.deviate(
        states_without_elements,
        strategy="NO_SHARD",
        torch_does=raises(RuntimeError, "1.weight is not in the optimizer state"),
        we_do=each(lambda value: value == expected),
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_elements")
@pytest.mark.deviation("fsdp.without_elements")
@pytest.mark.world_sizes(fewest=2)
def test_optim_state_beside_sharded_parameter_without_elements_is_saved(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        states_without_elements,
        strategy="FULL_SHARD",
        torch_does=raises(RuntimeError, "1.weight is not in the optimizer state"),
        we_do=each(lambda value: {"0.bias", "0.weight"} <= {*value["saved"]}),
    )


def sharded_round_trip_without_elements(scene: Scene, use_orig_params: bool) -> int:
    """Save and load a sharded state dict. Return the number of shards of the parameter without elements."""
    whole = nn.Sequential(nn.Linear(3, 4), Nothing())
    model = scene.wrap(filled(whole), use_orig_params=use_orig_params)
    with scene.fsdp.state_dict_type(model, scene.api.StateDictType.SHARDED_STATE_DICT):
        saved = model.state_dict()
        model.load_state_dict(saved)
    return len(saved["1.weight"].metadata().shards_metadata)


@clause("distributed.fsdp.fsdp_torch_limit_removed.without_elements")
@pytest.mark.deviation("fsdp.without_elements")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
def test_sharded_state_dict_of_parameter_without_elements_round_trips(
    cpu_twins: Twins, use_orig_params: bool
) -> None:
    cpu_twins.deviate(
        sharded_round_trip_without_elements,
        torch_does=raises(ZeroDivisionError),
        we_do=each(lambda shards: shards == cpu_twins.world_size),
        use_orig_params=use_orig_params,
    )
