"""The simulated accelerator: correct programs have one result, missing waits are hazards, seeds determine the order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.ranks.fixtures import require_simulator
from conformance.selftests import simulator_graph_programs  # noqa: F401 - its programs too
from conformance.selftests.processes import LIMIT_S, run_pytest, run_python
from conformance.selftests.simulator_programs import PROGRAMS
from conformance.simulator.control import in_program

SEEDS = 10
EXPECTED = "6000.0"

pytestmark = pytest.mark.deadline(LIMIT_S + 60)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    require_simulator()


@pytest.fixture(scope="session")
def outcomes() -> list[dict[str, object]]:
    ended = run_python("-m", "conformance.selftests.simulator_graph_programs", SEEDS)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def of(outcomes: list[dict[str, object]], name: str, right: bool) -> list[dict[str, object]]:
    return [outcome for outcome in outcomes if outcome["program"] == name and outcome["right"] == right]


def without_streams(hazard: dict[str, str]) -> list[str]:
    """Return a hazard without its streams, because streams of a program have new numbers in each run."""
    return [hazard[name] for name in ("now", "now_place", "before", "before_place")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_correct_program_has_one_result_and_no_hazard(outcomes: list, name: str) -> None:
    courses = of(outcomes, name, right=True)
    assert len(courses) == 2 * SEEDS
    assert {course["number"] for course in courses} == {EXPECTED}
    assert [course["hazards"] for course in courses if course["hazards"]] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_missing_wait_gives_wrong_result_under_some_schedule(outcomes: list, name: str) -> None:
    assert {course["number"] for course in of(outcomes, name, right=False)} - {EXPECTED}


@pytest.mark.parametrize("name", PROGRAMS)
def test_missing_wait_is_hazard_under_every_schedule(outcomes: list, name: str) -> None:
    for course in of(outcomes, name, right=False):
        assert course["hazards"], course
        assert all("_programs.py" in in_program(hazard["now_place"]) for hazard in course["hazards"]), course
        assert all("_programs.py" in in_program(hazard["before_place"]) for hazard in course["hazards"]), (
            course
        )


def test_record_stream_hint_is_equal_under_every_schedule(outcomes: list) -> None:
    hazards = [
        hazard for course in of(outcomes, "record_stream", right=False) for hazard in course["hazards"]
    ]
    assert hazards
    for hazard in hazards:
        assert "record_stream on that stream before it is freed" in hazard["missing"], hazard


@pytest.mark.parametrize("name", PROGRAMS)
def test_seed_determines_result(outcomes: list, name: str) -> None:
    for right in (True, False):
        courses = [
            {**course, "hazards": [without_streams(hazard) for hazard in course["hazards"]]}
            for course in of(outcomes, name, right)
        ]
        assert courses[:SEEDS] == courses[SEEDS:]


# The quick tests that found most faults on the simulated device. All tests together take minutes.
SAMPLE = (
    "nn/utils/test_clip_grad_parameters.py",
    "amp/test_grad_scaler_unscale.py",
    "amp/test_grad_scaler_unscale_inputs.py",
    "distributed/fsdp/test_fully_shard.py::test_training_matches_torch_and_unsharded",
    "distributed/fsdp/test_failures.py::test_gradients_of_earlier_backwards_count",
)


@pytest.mark.parametrize("tests", SAMPLE)
def test_impl_is_green_on_simulated_device(tests: str) -> None:
    options = ("--subject", "impl", "--device", "sim", "--world-sizes", 2, "--profile", "quick")
    ended = run_pytest(f"conformance/{tests}", *options)
    assert ended.returncode == 0, ended.stdout


def test_backward_on_device_works_after_backward_on_cpu() -> None:
    test = "conformance/amp/test_grad_scaler_microbatch.py::test_scale_falls_after_nonfinite_microbatch"
    options = ("--subject", "impl", "--device", "cpu,sim", "--profile", "quick")
    ended = run_pytest(test, *options)
    assert ended.returncode == 0, ended.stdout


FOREIGN = (
    "distributed/fsdp/test_fully_shard.py::test_training_matches_torch_and_unsharded",
    "nn/utils/test_clip_grad_dtensor.py::test_gradients_on_several_meshes_have_one_norm",
    "amp/test_grad_scaler_scale.py::test_odd_tensors",
)


def test_device_of_another_package_is_judged_through_its_claims_file(tmp_path: Path) -> None:
    """Ranks import the package too, and a limit of all devices outside torch is not a failure of this one."""
    (tmp_path / "elsewhere_npu.py").write_text(
        "from conformance import simulator\nsimulator.enable(name='elsewhere')\n"
    )
    claims = tmp_path / "claims.toml"
    claims.write_text('[device]\ntype = "elsewhere"\nimport = "elsewhere_npu"\n')
    options = ("--claims", claims, "--world-sizes", 2, "--profile", "quick")
    tests = [f"conformance/{test}" for test in FOREIGN]
    ended = run_pytest(*tests, *options, packages=[tmp_path])
    assert ended.returncode == 0, ended.stdout
    assert "reference cannot run here: 5" in ended.stdout


def test_training_has_bits_of_cpu_under_every_schedule() -> None:
    ended = run_python("-m", "conformance.selftests.simulator_training", 7)
    assert ended.returncode == 0, ended.stderr
    trainings = json.loads(ended.stdout)
    assert len(trainings) > 5
    for name, outcome in trainings.items():
        assert outcome == {"equal": [True] * 7, "hazards": []}, name


FAILED = """
import torch
from conformance import simulator

simulator.enable()

def report(call):
    try:
        print(call())
    except RuntimeError as error:
        print(str(error).splitlines()[0])

for seed in range(6):
    simulator.set_schedule(seed)
    x, side = torch.zeros(3, device="sim"), torch.Stream("sim")
    kept = torch.ones(3).pin_memory()
    side.wait_stream(torch.accelerator.current_stream())
    torch.accelerator.synchronize()
    simulator.launch(lambda: 1 / 0, [], [x], "division")
    simulator.launch(lambda: kept.zero_(), [], [kept], "later work")
    for wait in (x.tolist, side.synchronize, torch.accelerator.synchronize):
        report(wait)
    print(kept.tolist())
simulator.set_schedule(0)
report(lambda: torch.ones(2, device="sim").tolist())
simulator.launch(lambda: 1 / 0, [], [], "division")
report(lambda: simulator.set_schedule(0))
report(lambda: simulator.set_schedule(0))
report(lambda: torch.ones(2, device="sim").tolist())
"""


def test_error_on_device_ends_its_stream_and_is_raised_by_every_wait() -> None:
    """An error that no wait has raised is raised when the next schedule is set."""
    ended = run_python("-c", FAILED)
    assert ended.returncode == 0, ended.stderr
    error = "sim: division failed on the device: ZeroDivisionError: division by zero"
    after = ["[1.0, 1.0]", error, "None", "[1.0, 1.0]"]
    assert ended.stdout.splitlines() == [*[error, error, error, "[1.0, 1.0, 1.0]"] * 6, *after]


CALLED = """
import torch
from conformance import simulator

simulator.enable()
simulator.set_schedule(1)
x, aten = torch.ones(3, 3, device="sim"), torch.ops.aten
selected = torch.empty(0, device="sim")
numbers = torch.arange(3, device="sim")
calls = [
    (aten.relu.default, x),
    (aten.index_select.default, x, 0, numbers),
    (aten.fill_.Scalar, x, 1),
    (aten.matmul.default, x, x),
    (aten.mul.Tensor, x, x),
    (aten.nonzero.default, x),
    (aten.bincount.default, numbers),
    (aten.equal.default, x, x),
    (aten.masked_select.default, x, x > 0),
    (aten.multinomial.default, x[0], 2),
    (aten._aminmax.default, x),
    (aten.masked_select.out, x, x > 0),
    (aten.mm.dtype, x, x, torch.float64),
    (aten.hspmm.default, x, x),
]
for operator, *arguments in calls:
    simulator.take_host_waits()
    try:
        operator(*arguments, **({"out": selected} if operator is aten.masked_select.out else {}))
        print("waits" if simulator.take_host_waits() else "is queued")
    except NotImplementedError as error:
        print(str(error).splitlines()[0])
print(selected.tolist())
"""


def test_operator_is_queued_or_makes_the_host_wait_or_is_refused() -> None:
    """The host waits if the result depends on data or random numbers, or if its shape has no meta kernel."""
    ended = run_python("-c", CALLED)
    assert ended.returncode == 0, ended.stderr
    refused = "sim runs aten::{} by its kernel for the CPU, which it does not have"
    assert ended.stdout.splitlines() == [
        *["is queued"] * 5,
        *["waits"] * 7,
        *[refused.format(name) for name in ("mm", "hspmm")],
        str([1.0] * 9),
    ]


# Graphs: calls that a capture rejects like CUDA, and memory of graphs.

LOST = "the capture is lost: "
# By call: its error, and the error at the end of the capture.
REFUSED = {
    "nothing": ["", ""],
    "item": [LOST + "the host may not call item", LOST],
    "an event's query": [LOST + "the host may not call query", LOST],
    "an event's synchronize": [LOST + "the host may not call synchronize of an event", LOST],
    "a stream's query": [LOST + "the host may not call query", LOST],
    "synchronize": [LOST + "the host may not call synchronize", LOST],
    "a copy to the host": [LOST + "the host may not call a copy to the host", LOST],
    "what depends on data": [LOST + "the host may not call aten::nonzero", LOST],
    "a wait for what is not captured": ["is captured, and waits for what is not", LOST],
    "a wait of the default stream": ["the default stream waits for what is captured", LOST],
    "a stream that is not waited for": ["", "joined it and was not waited for"],
    "a replay": [LOST + "a graph is replayed in it", LOST],
    "numbers drawn": ["aten::normal_ draws its numbers on the host", ""],
    "memory that is not pinned": ["a copy from memory that is not pinned is captured", ""],
    "relaxed, an event's query": ["", ""],
    "in the default stream": ["a graph is captured in a stream that is not the default stream"],
    "a replay of nothing": ["a graph is replayed once it is captured"],
    "an event of a capture that is over": ["query of an event of a capture"],
    "a wait for an event of a capture that is over": ["waits for an event of a capture that is over"],
    "memory that is gone": ["a graph reads memory, in aten::add, that was freed since it was captured"],
}


def reported_by(case: str) -> dict:
    code = (
        "import json; from conformance import simulator; from conformance.selftests import simulator_graph_programs;"
        f"simulator.enable(); print(json.dumps(simulator_graph_programs.{case}()))"
    )
    ended = run_python("-c", code)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_capture_rejects_unsupported_calls() -> None:
    refused = reported_by("refusals")
    assert list(refused) == list(REFUSED)
    for name, expected in REFUSED.items():
        for words, text in zip(expected, refused[name], strict=True):
            assert words in text, name
            assert bool(words) is bool(text), name


def test_graph_owns_memory_and_runs_only_in_replays() -> None:
    facts = reported_by("facts")
    assert len(facts) == 9
    assert [name for name, is_so in facts.items() if not is_so] == []
