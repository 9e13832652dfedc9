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
    with RankPool(2, device=NAME, start_s=240) as pool_of_two:
        yield pool_of_two


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_hazard_and_changes_bits(pool: RankPool, bug: str) -> None:
    def courses(planted: bool) -> list[list[ScheduledTraining]]:
        return [pool.run(CASE, deadline_s=120, bug=bug, seed=seed, planted=planted) for seed in range(SEEDS)]

    right, wrong = courses(planted=False), courses(planted=True)
    expected = [course.bits for course in right[0]]
    for seed, rank_courses in enumerate(right):
        assert [course.hazards for course in rank_courses if course.hazards] == [], f"seed {seed}"
        assert [course.bits for course in rank_courses] == expected, f"seed {seed}"
    assert all(course.hazards for rank_courses in wrong for course in rank_courses)
    assert any([course.bits for course in rank_courses] != expected for rank_courses in wrong)
