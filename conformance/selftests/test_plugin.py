"""Selection of the tests that a subject is judged by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conformance.judge.clauses import HERE
from conformance.plugin import scattered, usable_world_sizes
from conformance.selection import applies_to


@pytest.mark.parametrize(("package", "own_parts"), [("impl", True), ("torch", False), ("else", False)])
def test_foreign_package_is_not_judged_by_repository_tests(package: str, own_parts: bool) -> None:
    def is_asked(file: str) -> bool:
        item: Any = SimpleNamespace(path=HERE / file)
        return applies_to(item, package)

    assert is_asked("amp/test_grad_scaler_step.py")
    assert is_asked("test_surface.py")
    assert is_asked("selftests/test_gate.py") == own_parts
    assert is_asked("training/test_training.py") == (package != "else")
    assert is_asked("../impl/kernels/tests/test_fused_step.py") == own_parts


@pytest.mark.parametrize(
    ("expected_worlds", "limits", "used"),
    [
        ([1, 2], {}, [1, 2]),
        ([1, 2], {"fewest": 2}, [2]),
        ([1, 2, 3, 4], {"fewest": 2}, [2, 3, 4]),
        ([1, 2], {"fewest": 3}, [3]),
        ([1, 2], {"also": [3]}, [1, 2, 3]),
        ([1], {"fewest": 2, "also": [3]}, [3]),
    ],
)
def test_test_runs_where_it_is_meaningful(
    expected_worlds: list[int], limits: dict[str, Any], used: list[int]
) -> None:
    assert usable_world_sizes(expected_worlds, **limits) == used


def test_few_tests_of_a_function_ask_torch() -> None:
    assert scattered(4, 4) == {0, 1, 2, 3}
    # Odd and even positions in both halves, so that most parameters differ.
    assert scattered(96, 4) == {0, 59, 22, 81}
