"""Memory of unsharded parameters that stays allocated after they are resharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.fully_shard_training import full_parameters
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import PlainTwins
from conformance.judge.clauses import clause


def kept_storage(scene: Scene, keep: bool, recurse: bool) -> dict[str, Any]:
    """Train two units. Return whether the memory of their weights is allocated after each step.

    The setting `keep` is reset at the end.
    """
    model: Any = filled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).to(scene.rank.device)
    scene.shard(model[0])
    scene.shard(model)
    if keep:
        model.set_keep_unsharded_storage(True, recurse=recurse)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    first = _unsharded(model)
    allocated = []
    for number in range(2):
        batch = torch.full((2, 4), 1.0 + scene.rank.rank + number, device=scene.rank.device)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        allocated.append(_are_allocated(first))
    same = [
        before.data_ptr() == after.data_ptr() for before, after in zip(first, _unsharded(model), strict=True)
    ]
    if keep:
        model.set_keep_unsharded_storage(False)
    _unsharded(model)
    return {
        "allocated": allocated,
        "same addresses": same if keep and recurse else None,
        "taken back": _are_allocated(first),
        "after": {name: values.tolist() for name, values in full_parameters(model).items()},
    }


def _unsharded(model: Any) -> list[Tensor]:
    """Unshard the units, keep their weights, and reshard the units again. Return the weights."""
    for unit in (model[0], model):
        unit.unshard()
    weights = [layer.weight.detach() for layer in model]
    for unit in (model[0], model):
        unit.reshard()
    return weights


def _are_allocated(weights: list[Tensor]) -> list[bool]:
    return [weight.untyped_storage().size() > 0 for weight in weights]


@clause("distributed.fsdp.fully_shard.kept_storage")
@pytest.mark.parametrize("recurse", [False, True], ids=["one unit", "all units"])
def test_unsharded_storage_is_kept(plain_twins: PlainTwins, recurse: bool) -> None:
    kept_values = plain_twins.values(kept_storage, keep=True, recurse=recurse)
    freed = plain_twins.values(kept_storage, keep=False, recurse=recurse)
    for kept_value, freed_value in zip(kept_values, freed, strict=True):
        assert kept_value["allocated"] == [[recurse, True]] * 2
        assert freed_value["allocated"] == [[False, False]] * 2
        assert kept_value["same addresses"] == ([True, True] if recurse else None)
        assert kept_value["taken back"] == [False, False]
        assert kept_value["after"] == freed_value["after"]
