"""Sharded training that new processes continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import resume_cases
from conformance.distributed.fsdp.resume_cases import APIS, INF_AT
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankPool

STEPS, SAVED_AFTER = 6, 3


@clause("distributed.fsdp.resume.new_processes")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.deadline(120)
def test_new_processes_continue_bit_for_bit(
    rank_pool: RankPool, subject: Library, world_size: int, device: str, tmp_path: Path, api: str
) -> None:
    def train(pool: RankPool, **options: Any) -> list[list[Any]]:
        return pool.run(
            resume_cases.train,
            library=subject.spec,
            api=api,
            folder=str(tmp_path),
            steps=STEPS,
            **options,
        )

    uninterrupted = train(rank_pool, saves_after=SAVED_AFTER)
    warm_up = ("conformance.ranks.cases:load", {"library": subject.spec})
    with RankPool(world_size, device=device, warm_up=warm_up) as new_processes:
        resumed = train(new_processes, first_step=SAVED_AFTER)
    for expected, actual in zip(uninterrupted, resumed, strict=True):
        scales = [scale for _, scale in expected[:-1]]
        assert scales[INF_AT] < scales[0] < scales[-1], "the scale has to fall and grow"
        assert [scale for _, scale in actual[:-1]] == scales[SAVED_AFTER:]
        losses = [loss for loss, _ in expected[SAVED_AFTER:-1]]
        assert all(torch.equal(a, b) for a, (b, _) in zip(losses, actual[:-1], strict=True))
        assert len(set(map(float, losses))) == len(losses)
        assert all(torch.equal(a, b) for a, b in zip(expected[-1], actual[-1], strict=True))
