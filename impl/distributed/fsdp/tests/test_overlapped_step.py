"""`overlapped_step` on a device that runs late has the bits of `fused_step`, and needs each of its waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.judge.judgement import unavailable
from conformance.ranks import Rank, RankPool
from conformance.simulator import NAME, Unavailable, ensure_built
from impl.amp import GradScaler
from impl.distributed.fsdp import CPUOffloadPolicy, fully_shard
from impl.distributed.fsdp.tests import overlapped_step_cases
from impl.optim import _updates_ahead

CASE = f"{overlapped_step_cases.__name__}:train"
# The first four schedules, of which the second one runs all as late as possible, and two random ones.
SEEDS = range(6)

pytestmark = pytest.mark.deadline(300)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    try:
        ensure_built()
    except Unavailable as error:
        unavailable(str(error))
    with RankPool(2, device=NAME, start_s=240) as pool:
        yield pool


def results_of(ranks: RankPool, **arguments: Any) -> str:
    return repr(ranks.run(CASE, deadline_s=120, **arguments))


@pytest.mark.parametrize("face", ["FSDP1", "fully_shard"])
def test_overlapped_step_has_bits_of_fused_step_on_late_device(ranks: RankPool, face: str) -> None:
    expected = results_of(ranks, face=face, fault="nothing", seed=0, overlaps=False)
    for seed in SEEDS:
        actual = results_of(ranks, face=face, fault="nothing", seed=seed, overlaps=True)
        assert actual == expected, f"schedule {seed}"


@pytest.mark.parametrize("fault", ["wait", "earlier values"])
@pytest.mark.parametrize("face", ["FSDP1", "fully_shard"])
def test_missing_wait_changes_result_on_late_device(ranks: RankPool, face: str, fault: str) -> None:
    expected = results_of(ranks, face=face, fault="nothing", seed=0, overlaps=False)
    assert results_of(ranks, face=face, fault=fault, seed=1, overlaps=True) != expected


def train_with_biases_frozen_in_turn(rank: Rank) -> tuple[int, int]:
    """Return the elements of the parameters, and those of the parameters whose earlier values are saved."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer, scaler = torch.optim.AdamW(model.parameters()), GradScaler("cpu", init_scale=1.0)
    for step in range(8):
        for number, layer in enumerate(model):
            layer.bias.requires_grad_((step >> number) % 2 == 0)
        optimizer.zero_grad()
        with scaler.overlapped_step(optimizer) as result:
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    assert result.early_numel
    batches = _updates_ahead._memories[optimizer].batches.values()
    saved = sum(param.numel() for batch in batches for param in batch.params)
    return sum(param.numel() for param in model.parameters()), saved


def test_earlier_values_are_saved_once_whatever_is_frozen() -> None:
    with RankPool(1) as pool:
        [(numel, saved)] = pool.run(train_with_biases_frozen_in_turn)
    assert 0 < saved <= numel
