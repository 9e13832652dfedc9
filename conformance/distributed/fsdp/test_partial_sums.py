"""Gradients of replicas that put off their all-reduce, for any parameters that micro-batches use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.fsdp_training import mesh_of
from conformance.distributed.fsdp.scenes.fully_shard_training import full_gradients
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.distributed.fsdp.scenes.scene import Scene, filled
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE, TwinsOf
from conformance.judge.clauses import clause

LAYERS, _WIDTH = 3, 3
_LAYERS = st.sets(st.integers(0, LAYERS - 1), min_size=1).map(sorted)
LayerChoices = Sequence[Sequence[int]]  # layers that each micro-batch uses


class SelectableLayers(nn.Module):
    """Linear layers of one size. Each forward says which layers it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor, choices: Sequence[int]) -> Tensor:
        return torch.stack([self.layers[number](x).square().sum() for number in choices]).sum()


def _batch(rank: int, number: int) -> Tensor:
    return torch.linspace(-1 - rank, 2 + number, 2 * _WIDTH, dtype=torch.float64).view(2, _WIDTH)


def partial_sums(
    scene: Scene, choices: LayerChoices, shards: int, is_unit_each: bool
) -> dict[str, Tensor | None]:
    """Return the gradients after micro-batches of which only the last one reduces over the replicas."""
    model: Any = filled(SelectableLayers().double()).to(scene.rank.device)
    mesh = mesh_of(scene.rank, shards)
    for layer in model.layers if is_unit_each else ():
        scene.shard(layer, mesh=mesh)
    scene.shard(model, mesh=mesh)
    for number, layers in enumerate(choices):
        model.set_requires_all_reduce(number == len(choices) - 1)
        scene.mean(lambda rank: model(_batch(rank, number).to(scene.rank.device), layers)).backward()  # noqa: B023
    return full_gradients(model)


@clause("distributed.fsdp.fully_shard.partial_sums")
@pytest.mark.deviation("fully_shard.partial_sums")
@pytest.mark.parametrize(("all_ranks", "shards"), [(2, 1), pytest.param(4, 2, marks=FULL_PROFILE)])
@share_of_examples(0.2)
@given(choices=st.lists(_LAYERS, min_size=2, max_size=3), is_unit_each=st.booleans())
@example(choices=[[0], [1]], is_unit_each=False)
@example(choices=[[0, 1], [2]], is_unit_each=False)
@example(choices=[[0, 1], [1]], is_unit_each=True)
def test_partial_sums_belong_to_their_parameters(
    plain_twins_of: TwinsOf, all_ranks: int, shards: int, choices: LayerChoices, is_unit_each: bool
) -> None:
    """torch adds partial sums of different parameters by position, or raises an error if their sizes differ."""
    plain_twins_of(all_ranks).deviate_to_unsharded(
        partial_sums, choices=choices, shards=shards, is_unit_each=is_unit_each, may_agree=True
    )
