"""Selection of the tests that a subject is judged by."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.clauses import HERE, all_clauses
from conformance.plugin import scattered, usable_world_sizes
from conformance.selection import applies_to, cover_pairs
from conformance.selftests.processes import run_fresh_python, run_pytest


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
def test_test_runs_on_usable_world_sizes(
    expected_worlds: list[int], limits: dict[str, Any], used: list[int]
) -> None:
    assert usable_world_sizes(expected_worlds, **limits) == used


def test_scattered_tests_differ_in_parameters() -> None:
    assert scattered(4, 4) == {0, 1, 2, 3}
    # Odd and even positions in both halves, so that most parameters differ.
    assert scattered(96, 4) == {0, 59, 22, 81}


PAIRS = st.lists(st.fixed_dictionaries(dict.fromkeys("abc", st.integers(0, 3))), max_size=20)


@given(PAIRS)
def test_each_pair_of_parameters_is_covered(cases: list[dict[str, int]]) -> None:
    def pairs(numbers: Iterable[int]) -> set[Any]:
        return {pair for n in numbers for pair in itertools.combinations(cases[n].items(), 2)}

    chosen = cover_pairs(cases)
    assert pairs(chosen) == pairs(range(len(cases)))


def test_half_of_three_parameters_covers_pairs() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in itertools.product([1, 2], repeat=3)]
    assert len(cover_pairs(cases)) == 4
    assert cover_pairs(cases[:1] * 3) == {0}
    assert cover_pairs([{}]) == {0}
    assert cover_pairs([{"a": 1, "b": value} for value in range(9)]) == set(range(9))


def collected(*words: str) -> list[str]:
    """Return the node ids that pytest collects without packages of other extras than `conformance`."""
    others = ("matplotlib", "jsonschema", "asv", "asv_runner", "virtualenv")
    program = (
        f"import sys, pytest\nsys.modules |= dict.fromkeys({others})\nsys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-q", "-n0", "-pno:cacheprovider", "--collect-only", "--device=cpu", "--world-sizes=1,2"]
    ended = run_fresh_python("-c", program, *options, *words)
    assert ended.returncode == 0, ended.stdout[-2000:]
    return ended.stdout.splitlines()


@pytest.mark.deadline(280)
def test_whole_suite_is_collected_without_other_extras() -> None:
    assert len(collected("--profile=full", "conformance")) > 5000


@pytest.mark.deadline(280)
def test_only_quick_profile_omits_combinations() -> None:
    name = "test_wrapped_model_can_be_converted"
    nodeid = f"conformance/distributed/fsdp/test_fsdp_methods.py::{name}"

    def combinations(profile: str, *words: str) -> list[str]:
        lines = collected(f"--profile={profile}", *(words or (nodeid,)))
        return [line for line in lines if f"::{name}[" in line]

    # 24 pairs of six wrappings and four conversions, each on one rank or on two.
    complete = combinations("full")
    assert (len(combinations("quick")), len(complete)) == (24, 48)
    assert combinations("quick", *complete) == complete


EQUAL_PARAMETERS = """
import pytest

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.clause(clause)) for clause in {clauses}])
def test_x(x): ...
"""


@pytest.mark.deadline(280)
def test_quick_profile_keeps_each_clause_of_function(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(EQUAL_PARAMETERS.format(clauses=list(all_clauses())[:2]))
    plugins = ("-p", "conformance.plugin", "-p", "conformance.ranks.fixtures")
    ended = run_pytest(*plugins, "--subject=torch", "--profile=quick", "--collect-only", file, cwd=tmp_path)
    assert "\n2 tests collected" in ended.stdout, ended.stdout + ended.stderr
