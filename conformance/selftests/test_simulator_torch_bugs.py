"""Races of torch's that are mended: planted again they are seen, and without them there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.judge.judgement import unavailable
from conformance.ranks import RankPool
from conformance.selftests.simulator_sharded import ScheduledTraining
from conformance.selftests.simulator_torch_bugs import BUGS
from conformance.simulator import NAME, Unavailable, ensure_built

CASE = "conformance.selftests.simulator_torch_bugs:course"
SEEDS = 6

pytestmark = pytest.mark.deadline(560.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    try:
        ensure_built()
    except Unavailable as error:
        unavailable(str(error))
    with RankPool(2, device=NAME, start_s=240) as made:
        yield made


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_a_hazard_and_other_bits(pool: RankPool, bug: str) -> None:
    def courses(planted: bool) -> list[list[ScheduledTraining]]:
        return [pool.run(CASE, deadline_s=120, bug=bug, seed=seed, planted=planted) for seed in range(SEEDS)]

    right, wrong = courses(planted=False), courses(planted=True)
    expected = [one.bits for one in right[0]]
    for seed, found in enumerate(right):
        assert [one.hazards for one in found if one.hazards] == [], f"seed {seed}"
        assert [one.bits for one in found] == expected, f"seed {seed}"
    assert all(one.hazards for found in wrong for one in found)
    assert any([one.bits for one in found] != expected for found in wrong)
