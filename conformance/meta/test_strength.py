"""Each planted fault turns the suite red: one test a fault, each in a process of its own."""

from __future__ import annotations

import pytest

from conformance.clauses import HERE
from conformance.library import Library
from conformance.strength import _judge, judge, plant_ids


@pytest.mark.profile("full")
@pytest.mark.deadline(330)
@pytest.mark.parametrize("plant_id", plant_ids())
def test_the_suite_turns_red(subject: Library, plant_id: str) -> None:
    kill = judge(plant_id, subject.package)
    assert kill.killed, f"the suite stays green although {kill.says or plant_id}"


@pytest.mark.profile("full")
@pytest.mark.deadline(330)
def test_tests_that_need_ranks_are_green_without_a_fault(subject: Library) -> None:
    """The process that judges must let tests start processes: otherwise they would kill any fault."""
    kill = _judge("nothing", subject.package, [HERE / "nn/utils/test_clip_grad_dtensor.py"], "quick")
    assert not kill.killed, f"{kill.nodeid}: {kill.how}"
