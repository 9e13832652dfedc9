"""Each planted fault turns the suite red: one test a fault, each in a process of its own."""

from __future__ import annotations

import pytest

from conformance.library import Library
from conformance.strength import judge, plant_ids


@pytest.mark.profile("full")
@pytest.mark.deadline(330)
@pytest.mark.parametrize("plant_id", plant_ids())
def test_the_suite_turns_red(subject: Library, plant_id: str) -> None:
    kill = judge(plant_id, subject.package)
    assert kill.killed, f"the suite stays green although {kill.says or plant_id}"
