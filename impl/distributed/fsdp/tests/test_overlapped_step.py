"""`overlapped_step` on a device that runs late has the bits of `fused_step`, and needs each of its waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conformance.judge.judgement import unavailable
from conformance.ranks import RankPool
from conformance.simulator import NAME, Unavailable, ensure_built
from impl.distributed.fsdp.tests import overlapped_step_cases

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
