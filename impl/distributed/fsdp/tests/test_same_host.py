"""Ranks of one host read one another's memory, where all can."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest
import torch

from conformance.judge.judgement import unavailable
from conformance.ranks import RankFault, RankPool
from impl.distributed.fsdp._comm import same_host
from impl.distributed.fsdp.tests import same_host_cases
from impl.distributed.fsdp.tests.same_host_cases import given_by

pytestmark = [
    pytest.mark.deadline(120),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has process_vm_readv"),
]
CASES = same_host_cases.__name__
KEPT_APART = "this machine keeps processes from reading one another's memory"
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunks", "beyond"), [(1, -1), (3, 1)])
@pytest.mark.parametrize("more_ranks", [2, 3])
def test_exchange_returns_other_ranks_values(
    ranks: Callable[..., RankPool], more_ranks: int, chunks: int, beyond: int, dtype: torch.dtype
) -> None:
    shard_numel = chunks * same_host._CHUNK_BYTES // dtype.itemsize + beyond
    outcomes = ranks(more_ranks).run(f"{CASES}:exchange", shard_numel=shard_numel, dtype=dtype)
    if outcomes == [None] * more_ranks:
        unavailable(KEPT_APART)
    whole = torch.cat([given_by(rank, shard_numel, dtype) for rank in range(more_ranks)])
    total = torch.stack([given_by(rank, more_ranks * shard_numel, dtype) for rank in range(more_ranks)]).sum(
        0
    )
    for (actual, shard), expected in zip(outcomes, total.split(shard_numel), strict=True):
        assert torch.equal(actual, whole)
        assert torch.equal(shard, expected)


@pytest.mark.parametrize("kind", same_host_cases.KINDS)
def test_parameters_are_read_to_where_they_belong(ranks: Callable[..., RankPool], kind: str) -> None:
    outcomes = ranks(4).run(f"{CASES}:unshard", kind=kind)
    if not any(fills for _, fills in outcomes):
        unavailable(KEPT_APART)
    assert outcomes == [[True, True]] * 4


@pytest.mark.parametrize("blind", [0, 2])
def test_no_rank_reads_if_any_rank_cannot(ranks: Callable[..., RankPool], blind: int) -> None:
    assert ranks(3).run(f"{CASES}:meet_one_that_cannot_read", blind=blind) == [False] * 3


def test_unequal_sizes_are_refused_before_anything_is_read(ranks: Callable[..., RankPool]) -> None:
    reported = ranks(2).run(f"{CASES}:offer_unequal_sizes")
    if reported == [None, None]:
        unavailable(KEPT_APART)
    assert reported == [
        f"rank {1 - rank} of the group offers {4 * (6 - rank)} bytes, this one {4 * (5 + rank)}"
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("victim", [0, 2])
def test_error_names_lost_rank_and_gathered_unit(victim: int) -> None:
    """The first rank serves the store."""
    with RankPool(3, grace_s=20.0) as pool:
        try:
            pool.run(f"{CASES}:lose_one_whose_memory_is_read", victim=victim)
        except RankFault as fault:
            reported = {
                failure.rank: failure.text for failure in fault.scene.failures if failure.rank != victim
            }
        else:
            unavailable(KEPT_APART)
    assert len(reported) == 2, reported
    for text in reported.values():
        assert re.search(rf"gathered 'a' in vain; .*ranks? (\d, )*{victim}\b", text), text
