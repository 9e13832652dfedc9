"""The simulated accelerator: right programs have one result, what is left out of one is seen, a seed is a course."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.judge.judgement import unavailable
from conformance.selftests import simulator_graph_cases  # noqa: F401 - its programs too
from conformance.selftests.simulator_cases import PROGRAMS
from conformance.simulator import Unavailable, ensure_built
from conformance.simulator.control import in_program

ROOT = Path(__file__).parents[2]
SEEDS = 10
EXPECTED = "6000.0"
_LIMIT_S = 500.0  # the extension is built, if it is not in the cache

pytestmark = pytest.mark.deadline(_LIMIT_S + 60)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    try:
        ensure_built()
    except Unavailable as error:
        unavailable(str(error))


def run(*words: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *(str(word) for word in words)]
    return subprocess.run(
        command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )


@pytest.fixture(scope="session")
def seen() -> list[dict[str, object]]:
    ended = run("-m", "conformance.selftests.simulator_graph_cases", SEEDS)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def of(seen: list[dict[str, object]], name: str, right: bool) -> list[dict[str, object]]:
    return [one for one in seen if one["program"] == name and one["right"] == right]


def without_streams(hazard: dict[str, str]) -> list[str]:
    """Those that a program makes have new numbers in each run."""
    return [hazard[name] for name in ("now", "now_place", "before", "before_place")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_has_one_result_under_every_schedule_and_no_hazard(seen: list, name: str) -> None:
    courses = of(seen, name, right=True)
    assert len(courses) == 2 * SEEDS
    assert {one["number"] for one in courses} == {EXPECTED}
    assert [one["hazards"] for one in courses if one["hazards"]] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_left_out_makes_a_wrong_number_under_some_schedule(seen: list, name: str) -> None:
    assert {one["number"] for one in of(seen, name, right=False)} - {EXPECTED}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_left_out_is_a_hazard_under_every_schedule(seen: list, name: str) -> None:
    for one in of(seen, name, right=False):
        assert one["hazards"], one
        assert all("_cases.py" in in_program(hazard["now_place"]) for hazard in one["hazards"]), one
        assert all("_cases.py" in in_program(hazard["before_place"]) for hazard in one["hazards"]), one


def test_the_cure_of_memory_given_out_too_early_is_the_same_under_every_schedule(seen: list) -> None:
    for one in of(seen, "record_stream", right=False):
        for hazard in one["hazards"]:
            assert "record_stream on that stream before it is freed" in hazard["missing"], one


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_seed_has_one_result(seen: list, name: str) -> None:
    for right in (True, False):
        courses = [
            {**one, "hazards": [without_streams(hazard) for hazard in one["hazards"]]}
            for one in of(seen, name, right)
        ]
        assert courses[:SEEDS] == courses[SEEDS:]


def test_a_claims_file_may_name_it_as_the_device_that_is_judged_on(tmp_path: Path) -> None:
    claims = tmp_path / "claims.toml"
    claims.write_text("[device]\ntype = 'sim'\nimport = 'conformance.simulator'\n")
    test = "conformance/nn/utils/test_clip_grad_value.py::test_long_gradients_among_short_ones"
    ended = run("-m", "pytest", "-n", 0, "-q", test, "--subject", "torch", "--claims", claims)
    assert "BAD INPUT" not in ended.stdout
    assert ended.returncode == 0, ended.stdout


# What of quick has shown most there: the whole of it takes minutes.
SAMPLE = (
    "nn/utils/test_clip_grad_parameters.py",
    "amp/test_grad_scaler_unscale.py",
    "distributed/fsdp/test_fully_shard.py::test_trains",
    "distributed/fsdp/test_failures.py::test_gradients_of_earlier_backwards_count",
)


@pytest.mark.parametrize("tests", SAMPLE)
def test_impl_is_green_there(tests: str) -> None:
    options = ("--subject", "impl", "--device", "sim", "--world-sizes", 2, "--profile", "quick")
    ended = run("-m", "pytest", "-n", 0, "-q", f"conformance/{tests}", *options)
    assert ended.returncode == 0, ended.stdout


def test_another_name_is_a_device_like_any() -> None:
    """Of those that torch does not bring: what works there is not made for `sim`."""
    test, name = "conformance/distributed/fsdp/test_fully_shard.py::test_trains", "elsewhere"
    options = ("--device", name, "--world-sizes", 2, "--profile", "quick")
    ended = run("-m", "pytest", "-n", 0, "-q", test, *options, TANDEM_SIMULATOR_NAME=name)
    assert ended.returncode == 0, ended.stdout
    assert "1 passed" in ended.stdout


def test_training_has_the_bits_of_the_cpu_under_every_schedule() -> None:
    ended = run("-m", "conformance.selftests.simulator_training", 7)
    assert ended.returncode == 0, ended.stderr
    for name, told in json.loads(ended.stdout).items():
        assert told == {"equal": [True] * 7, "hazards": []}, name


# Each of which was right at its call before, with another number or by itself.
REFUSED = """
import torch
from conformance import simulator

simulator.enable()
simulator.set_schedule(1)  # as late as it may be
x, u, i = (torch.ones(3, dtype=dtype, device="sim") for dtype in (torch.float32, torch.uint8, torch.int32))
for call, right, wrong in (
    (u.fill_, 3, 300),
    (i.fill_, 0.0, float("nan")),
    (i.fill_, 1e9, 1e10),
    (lambda least: torch.histc(x, 4, least, 3.0), 2.0, 4.0),
    (lambda lambd: torch.nn.functional.softshrink(x, lambd), 0.5, -1.0),
    (lambda p: torch.renorm(x.view(3, 1), p, 0, 1.0), 2.0, -2.0),
    (lambda length: x.add_(torch.ones(length, device="sim")), 3, 4),
):
    call(right)
    for _ in range(2):
        try:
            call(wrong)
        except RuntimeError as error:
            print(error)
print(*(len(torch.arange(0.5, end, 0.25, device="sim")) for end in (0.5, 1.0)))
"""


def test_what_is_refused_is_told_at_its_call_whatever_was_taken_before() -> None:
    ended = run("-c", REFUSED)
    assert ended.returncode == 0, ended.stderr
    *told, drawn = ended.stdout.splitlines()
    assert len(told) == 14
    assert not any("failed on the device" in one for one in told)
    assert drawn == "0 2"
