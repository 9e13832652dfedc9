"""Cases of replicas that put off their all-reduce while micro-batches use different parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.distributed.fsdp.fsdp_cases import mesh_of
from conformance.distributed.fsdp.fully_shard_cases import full_value
from conformance.distributed.fsdp.fully_shard_construct_cases import Site
from conformance.distributed.fsdp.lab import filled

_WIDTH = 3
LAYERS = 3
LayerChoices = Sequence[Sequence[int]]  # layers that each micro-batch uses


class SelectableLayers(nn.Module):
    """Linear layers of one size. Each forward says which layers it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor, choices: Sequence[int]) -> Tensor:
        return torch.stack([self.layers[number](x).square().sum() for number in choices]).sum()


def _model() -> Any:
    with torch.random.fork_rng([]):
        return filled(SelectableLayers().double())


def _batch(rank: int, number: int) -> Tensor:
    return torch.linspace(-1 - rank, 2 + number, 2 * _WIDTH, dtype=torch.float64).view(2, _WIDTH)


def partial_sums(site: Site, choices: LayerChoices, shards: int, is_unit_each: bool) -> list[Tensor | None]:
    """Return the gradients after micro-batches of which only the last one reduces over the replicas."""
    model = _model().to(site.rank.device)
    mesh = mesh_of(site.rank, shards)
    for layer in model.layers if is_unit_each else ():
        site.shard(layer, mesh=mesh)
    site.shard(model, mesh=mesh)
    for number, layers in enumerate(choices):
        model.set_requires_all_reduce(number == len(choices) - 1)
        model(_batch(site.rank.rank, number).to(site.rank.device), layers).backward()
    return [None if param.grad is None else full_value(param.grad).cpu() for param in model.parameters()]


def partial_sums_by_hand(choices: LayerChoices, world_size: int) -> list[Tensor | None]:
    model = _model()
    for number, layers in enumerate(choices):
        for rank in range(world_size):
            (model(_batch(rank, number), layers) / world_size).backward()
    return [param.grad for param in model.parameters()]
