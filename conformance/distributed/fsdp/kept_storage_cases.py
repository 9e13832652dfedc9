"""Cases in which memory of unsharded parameters stays allocated after they are resharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conformance.distributed.fsdp.fully_shard_cases import full_value
from conformance.distributed.fsdp.fully_shard_construct_cases import Site

_STEPS = 2


def kept_storage(site: Site, keep: bool, recurse: bool) -> dict[str, Any]:
    """Train two units. Return whether the memory of their weights is allocated after each step.

    The setting `keep` is reset at the end.
    """
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(site.rank.device)
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.25 + number / 8)
    site.shard(model[0])
    site.shard(model)
    if keep:
        model.set_keep_unsharded_storage(True, recurse=recurse)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    first = _unsharded(model)
    allocated = []
    for number in range(_STEPS):
        batch = torch.full((2, 4), 1.0 + site.rank.rank + number, device=site.rank.device)
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
        "after": [full_value(parameter).tolist() for parameter in model.parameters()],
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
