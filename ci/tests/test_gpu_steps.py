"""Tests of the phases of `ci/gpu` that time steps against torch: steps, large and fake."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import LARGE_SHAPES, SHAPES
from benchmarks.timing import Workload
from conformance.gpu import fake, large, phase_rows, phases, steps
from conformance.gpu.phase_rows import PhaseTask, Rows, read_rows

# A phase keeps the file of its rows open for as long as its process lives.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Restore the number of threads, which phases set for their process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def read_rows_of(
    tmp_path: Path, work: Callable[[PhaseTask, Rows], None], left_s: float = 300.0, subject: str = "impl"
) -> phase_rows.PhaseRows:
    file = tmp_path / "rows.jsonl"
    task = PhaseTask(str(file), time.monotonic() + left_s, "cpu", subject)
    work(task, Rows(task))
    return read_rows(file)


@pytest.mark.deadline(120)
def test_every_call_of_a_step_is_timed_against_torch(tmp_path: Path) -> None:
    result = read_rows_of(tmp_path, steps.work)
    assert not result.missing
    assert [row["outcome"] for row in result.rows] == ["measured"] * len(result.rows), result.rows
    assert {row["call"] for row in result.rows} == steps.CALLS.keys()
    for row in result.rows:
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["host_seconds"] > 0
        assert (row["ratio_to_foreach"] is not None) == (row["call"] == "fused_step")


@pytest.mark.deadline(120)
def test_large_steps_include_a_copy_for_comparison(tmp_path: Path) -> None:
    result = read_rows_of(tmp_path, large.work)
    assert not result.missing
    assert [row["outcome"] for row in result.rows] == ["measured"] * len(result.rows), result.rows
    copies = {row["dtype"]: row for row in result.rows if row["call"] == "copy"}
    assert {dtype: row["bytes"] for dtype, row in copies.items()} == {"float32": 800_000, "bfloat16": 400_000}


@pytest.mark.parametrize("work", [steps.work, large.work, fake.work])
def test_phase_without_time_plans_its_rows_and_stops(
    tmp_path: Path, work: Callable[[PhaseTask, Rows], None]
) -> None:
    result = read_rows_of(tmp_path, work, left_s=0.0)
    assert result.rows == []
    assert result.missing


def test_failed_call_leaves_the_others_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: str, *case: Any) -> Workload:
        raise RuntimeError("no memory")

    monkeypatch.setitem(steps.CALLS, "unscale_", (broken, ()))
    monkeypatch.setattr(steps, "_SHAPES", {"cpu": ("4x1k",)})
    rows = {row["name"]: row for row in read_rows_of(tmp_path, steps.work).rows}
    failed = rows["unscale_ 4x1k float32"]
    assert (failed["outcome"], failed["says"]) == ("failed", "RuntimeError: no memory")
    assert rows["clip_grad_norm_ 4x1k float32"]["outcome"] == "measured"


def test_torch_has_rows_of_its_own_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_SHAPES", {"cpu": ("4x1k",)})
    rows = read_rows_of(tmp_path, steps.work, subject="torch").rows
    assert {row["outcome"] for row in rows} == {"measured"}


def test_wrong_step_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = steps.CALLS["clip_grad_norm_"]

    def returns_zero(subject: str, *case: Any) -> Workload:
        work = make(subject, *case)
        if subject == "torch" or work.effect is None:
            return work
        _, *grads = work.effect()
        return replace(work, effect=lambda: [torch.zeros(()), *grads])

    monkeypatch.setitem(steps.CALLS, "clip_grad_norm_", (returns_zero, words))
    monkeypatch.setattr(steps, "_SHAPES", {"cpu": ("4x1k",)})
    rows = {row["name"]: row for row in read_rows_of(tmp_path, steps.work).rows}
    assert rows["clip_grad_norm_ 4x1k float32"]["outcome"] == "failed"
    assert "not close" in rows["clip_grad_norm_ 4x1k float32"]["says"]


def test_host_time_excludes_preparation() -> None:
    prepared: list[int] = []

    def prepare() -> None:
        time.sleep(0.01)
        prepared.append(0)

    assert steps.host_seconds(Workload(lambda: None, prepare), "cpu") < 0.01
    assert len(prepared) == steps._HOST_CALLS


def test_large_lists_have_a_billion_elements_and_are_not_benchmarks() -> None:
    [(shapes, tensors)] = LARGE_SHAPES.items()
    assert shapes == large._SHAPES["cuda"]
    assert shapes not in SHAPES
    assert sum(shape[0] for shape in tensors) == 2**30


@pytest.mark.deadline(200)
def test_sharded_steps_are_timed_over_fake_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fsdp_ranks.LAYERS", 1)
    result = read_rows_of(tmp_path, fake.work)
    rows = {row["name"]: row for row in result.rows}
    assert rows.keys() == fake.APIS.keys()
    for row in rows.values():
        assert row["outcome"] == "measured", row["says"]
        assert (row["world_size"], row["kernels"], row["peak_bytes"]) == (8, None, None)
        assert row["seconds"] > 0
    assert not torch.distributed.is_initialized()


def test_api_that_a_subject_lacks_is_not_available(tmp_path: Path) -> None:
    rows = read_rows_of(tmp_path, fake.work, subject="json").rows
    assert {row["outcome"] for row in rows} == {"not available"}


# The program prints the name of each kernel that a check launches.
CHECKED = """
from triton.runtime.interpreter import GridExecutor
from conformance.gpu.kernels import checks
from impl import kernels

launch = GridExecutor.__call__

def report(self, *args, **options):
    print(self.fn.__name__)
    return launch(self, *args, **options)

GridExecutor.__call__ = report
for name, check in checks("cpu").items():
    if "float32" in name:
        with kernels.backend("triton"):
            check()
"""


def test_checks_of_kernels_launch_every_kernel() -> None:
    pytest.importorskip("triton")
    from conformance.gpu.ahead_of_time import CASES  # noqa: PLC0415  needs Triton

    done = subprocess.run(
        [sys.executable, "-c", CHECKED],
        cwd=phases.ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {case.kernel.__name__ for case in CASES}
