"""Tests of the phases of `ci/gpu` that compare with torch: waits, values and graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.gpu import (
    bandwidth,
    graphs,
    summary,
    sync_free_calls,
    sync_promises,
    values,
    waits,
)
from conformance.gpu.__main__ import phases
from conformance.gpu.phase_rows import PhaseTask, Rows, read_rows
from conformance.gpu.values import METHODS, Trained
from conformance.ranks.fake_group import fake_group
from conformance.strategies import missing_kernels
from impl.kernels._dispatch import requested_backend

# A phase keeps the file of its rows open for as long as its process lives.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
CASES = {case.name: case for case in sync_free_calls.CASES}


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Restore the number of threads, which phases set for their process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(tmp_path: Path, work: Callable[[PhaseTask, Rows], None], subject: str = "impl") -> dict[str, Any]:
    """Run a phase on the CPU and check that no planned row is missing. Return its rows by name."""
    file = tmp_path / "rows.jsonl"
    task = PhaseTask(str(file), time.monotonic() + 300, "cpu", subject)
    work(task, Rows(task))
    result = read_rows(file)
    assert result.planned
    assert not result.missing
    return {row["name"]: row for row in result.rows}


def test_promises_of_docstrings_are_found() -> None:
    promises = sync_promises.promises()
    assert promises["nn.utils.clip_grad_value_"] == "none"
    assert promises["nn.utils.clip_grad_norm"] == promises["nn.utils.clip_grad_norm_"]  # a reference
    assert promises["amp.GradScaler.update"].startswith("none unless the method")  # the class's sentence
    assert "distributed.fsdp.ShardedGradScaler.fused_step" in promises
    # The docstrings of these methods say that they synchronise.
    assert not promises.keys() & {"amp.GradScaler.get_scale", "amp.GradScaler.nonfinite_parameters"}


def test_every_promise_has_a_case() -> None:
    covered = {name for case in sync_free_calls.CASES for name in case.covers}
    assert covered == sync_promises.promises().keys()
    assert len(CASES) == len(sync_free_calls.CASES)


@pytest.mark.deadline(120)
def test_every_case_of_waits_runs_on_the_cpu(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, waits.work)
    assert {name: row["outcome"] for name, row in rows.items()} == dict.fromkeys(CASES, "not available")
    assert all("CUDA only" in row["says"] for row in rows.values())
    assert not torch.distributed.is_initialized()


@pytest.fixture
def debug_modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sync debug modes that are set on a fake CUDA device. The first is the initial mode."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(waits, "counted", lambda work, device: {"synchronisations": 0})
    return modes


def test_synchronisation_fails_with_its_stack(debug_modes: list[str]) -> None:
    def synchronise_in_error_mode() -> None:
        if debug_modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    case = sync_free_calls.WaitCase("waits", (), lambda device: synchronise_in_error_mode)
    outcome, says = waits.outcome_of(case, "cuda")
    assert outcome == "failed"
    assert says.startswith("RuntimeError: called a synchronizing CUDA operation\n")
    assert "in synchronise_in_error_mode" in says
    assert debug_modes == ["default", "error", "default"]


def test_call_that_never_waits_agrees(debug_modes: list[str]) -> None:
    case = sync_free_calls.WaitCase("runs on", (), lambda device: lambda: "captured")
    assert waits.outcome_of(case, "cuda") == ("agrees", "captured")
    assert debug_modes == ["default", "error", "default"]


@pytest.mark.usefixtures("debug_modes")
def test_wait_that_only_the_profiler_sees_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "counted", lambda work, device: {"synchronisations": 2})
    case = sync_free_calls.WaitCase("waits for events", (), lambda device: lambda: None)
    outcome, says = waits.outcome_of(case, "cuda")
    assert (outcome, "waits 2 times" in says) == ("failed", True)


def test_failed_case_leaves_no_process_group() -> None:
    case = sync_free_calls.WaitCase("refuses", (), lambda device: 1 / 0, needs_group=True)  # type: ignore[return-value]
    assert waits.outcome_of(case, "cpu")[0] == "failed"
    with fake_group(4):
        assert torch.distributed.get_world_size() == 4


@pytest.mark.deadline(120)
def test_steps_of_impl_agree_with_torch(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, values.work)
    assert {row["outcome"] for row in rows.values()} == {"agrees"}, rows
    scales = rows["fused_step float32"]["scales"]
    assert all(actual == expected for actual, expected in scales)
    # Three steps grow the scale, and the one with an inf halves it.
    assert scales[2][0] == 2 * scales[0][0]
    assert scales[values.INF_STEP][0] == scales[values.INF_STEP - 1][0] / 2


@pytest.fixture
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace torch's unscale operator by one that refuses bfloat16 on the CPU, as torch's does on CUDA."""
    operator = torch._amp_foreach_non_finite_check_and_unscale_

    def raise_for_bfloat16(grads: list[torch.Tensor], *numbers: torch.Tensor) -> None:
        if grads[0].dtype is torch.bfloat16:
            raise NotImplementedError("not implemented for 'BFloat16'")
        operator(grads, *numbers)

    measured = missing_kernels.refusal_of_bfloat16, missing_kernels.refuses_bfloat16
    monkeypatch.setattr(torch, operator.__name__, raise_for_bfloat16)
    for function in measured:
        function.cache_clear()
    yield
    for function in measured:
        function.cache_clear()


@pytest.mark.usefixtures("no_bfloat16")
def test_reference_is_unscaled_on_the_cpu_if_torch_refuses_bfloat16(tmp_path: Path) -> None:
    """The subject's own steps get no replacement: on the CPU its four calls use torch's operator, which refuses."""
    rows = rows_of(tmp_path, values.work)
    by_fused_step, by_four = rows["fused_step bfloat16"], rows["four calls bfloat16"]
    assert by_fused_step["outcome"] == "agrees"
    assert by_fused_step["says"].endswith("from torch's, which is unscaled on the CPU")
    assert (by_four["outcome"], by_four["says"]) == ("not available", "not implemented for 'BFloat16'")
    assert {rows[name]["outcome"] for name in rows if "float32" in name} == {"agrees"}


@pytest.mark.usefixtures("no_bfloat16")
def test_bandwidth_of_missing_kernel_is_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(call: Callable[[], object], device: str) -> float:
        call()
        return 1.0

    monkeypatch.setattr(bandwidth, "seconds", seconds)
    monkeypatch.setattr(bandwidth, "device_seconds", seconds)
    monkeypatch.setattr(bandwidth, "_SHAPES", {"cpu": ("4x1k",)})
    rows = rows_of(tmp_path, bandwidth.work)
    missing = {name for name, row in rows.items() if row["outcome"] != "measured"}
    assert missing == {"unscale_ impl 4x1k bfloat16", "unscale_ torch 4x1k bfloat16"}
    assert {rows[name]["outcome"] for name in missing} == {"not available"}


def test_torch_itself_has_no_fused_step(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, values.work, subject="torch")
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes["fused_step float32"] == "not available"
    assert outcomes["four calls bfloat16"] == "agrees"


def step_with_larger_lr(trained: Trained) -> torch.Tensor:
    trained.optimizer.param_groups[0]["lr"] = 1.001e-3 if trained.optimizer.state else 1e-3
    return trained.four_calls()


def step_with_other_norm(trained: Trained) -> torch.Tensor:
    return trained.four_calls() * 1.001


def step_without_update(trained: Trained) -> torch.Tensor:
    norm = trained.four_calls()
    trained.scaler._growth_tracker.zero_()
    return norm


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        (step_with_larger_lr, "parameters apart by"),
        (step_with_other_norm, "norm of step 0"),
        (step_without_update, "scale and growth tracker after step 0: (1024.0, 0), torch (1024.0, 1)"),
    ],
)
def test_wrong_steps_are_found(method: Callable[[Trained], torch.Tensor], fault: str) -> None:
    faults = values.compared("impl", method, torch.float32, "cpu")["faults"]
    assert fault in faults[0]


def test_graphs_need_cuda(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, graphs.work)
    assert len(rows) == 3
    assert {row["outcome"] for row in rows.values()} == {"not available"}


def warmed_up(call: graphs.Call) -> graphs.Call:
    for _ in range(graphs._WARM_UPS):
        call()
    return call


@pytest.mark.parametrize("name", METHODS)
def test_replays_are_compared_with_eager_steps(name: str) -> None:
    assert graphs.replayed_beside_eager("impl", METHODS[name], "cpu", warmed_up)["fault"] == ""


def test_eager_steps_use_torchs_operators_after_warm_up() -> None:
    used: list[str] = []

    def method(trained: Trained) -> torch.Tensor:
        used.append(requested_backend())
        return trained.four_calls()

    assert graphs.replayed_beside_eager("impl", method, "cpu", warmed_up)["fault"] == ""
    warm_ups = ["auto"] * graphs._WARM_UPS
    assert used[: 2 * graphs._WARM_UPS] == warm_ups * 2
    assert used[2 * graphs._WARM_UPS :][: 2 * graphs._REPLAYS] == ["auto", "torch"] * graphs._REPLAYS
    assert isinstance(graphs.torchs_operators("torch"), nullcontext)


@pytest.mark.parametrize(
    ("capture", "fault"),
    [
        (lambda call: warmed_up(call) and (lambda: None), "a replay leaves the parameters as they were"),
        (lambda call: lambda: (call(), call()), "parameters apart by"),
    ],
)
def test_wrong_replays_are_found(capture: Callable[[graphs.Call], graphs.Call], fault: str) -> None:
    row = graphs.replayed_beside_eager("impl", Trained.four_calls, "cpu", capture)
    assert row["fault"].startswith(fault)
    assert not math.isnan(row["parameters_apart"])


def test_captured_step_that_is_not_replayed_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    row = graphs.captured_beside_eager("impl", "cpu")
    assert row["fault"].startswith("the last step was not replayed")
    replayed = SimpleNamespace(graph=SimpleNamespace(replayed=True))
    monkeypatch.setattr("impl.optim.captured.explain", lambda optimizer: replayed)
    assert graphs.captured_beside_eager("impl", "cpu")["fault"] == ""


def test_captured_step_with_old_learning_rate_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(optimizer: torch.optim.Optimizer, graph: bool) -> None:
        step = optimizer.step

        def step_with_first_lr() -> None:
            optimizer.param_groups[0]["lr"] = 1e-3
            step()

        optimizer.step = step_with_first_lr  # type: ignore[method-assign]

    monkeypatch.setattr("impl.optim.captured.capture", capture)
    assert graphs.captured_beside_eager("impl", "cpu")["fault"].startswith("parameters differ in bits")


def test_every_phase_has_its_section_in_the_summary() -> None:
    names = {phase.name for phase in phases(0)}
    assert {"waits", "values", "graphs", "fake", "steps", "large"} <= names
    assert names == summary._SECTIONS.keys()


def test_section_lists_disagreeing_rows() -> None:
    rows = [
        {"name": "clip_grad_value_", "outcome": "agrees", "says": ""},
        {"name": "four calls", "outcome": "failed", "says": "RuntimeError: synchronizes\nstack"},
    ]
    text = summary._SECTIONS["waits"](rows)
    assert "1 of 2 agree." in text
    assert "| four calls | failed | RuntimeError: synchronizes stack |" in text
    assert "clip_grad_value_" not in text
    assert summary._SECTIONS["waits"](rows[:1]).endswith("1 of 1 agree.")
