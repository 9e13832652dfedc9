"""Tests of the phases of `ci/gpu` that need no device: counts, order, workers and probes."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import asv_format, catalogue, comparison, single
from benchmarks.timing import Workload
from conformance.gpu import (
    judge_order,
    judge_plugin,
    judging_phase,
    launches,
    probe,
    probed_operations,
    speed_phase,
)
from conformance.gpu.phase_rows import PhaseTask, read_rows
from conformance.judge.rank_errors import FaultRecord
from conformance.ranks import RankDied, RankHung, pool, process

ROOT = Path(__file__).parents[2]


def test_results_distinguish_failed_from_unmeasured() -> None:
    kind = next(kind for kind in catalogue.load_all() if kind.__name__ == "Update")
    name = "bench_grad_scaler.Update.time_call"
    cases: dict[tuple[str, ...], Any] = {
        ("'impl'", "'cpu'"): {"result": 2.0, "q_25": 1.0},
        ("'torch'", "'cpu'"): None,
    }
    results = asv_format.results(
        asv_format.describe_benchmarks([kind]),
        {name: cases},
        {"machine": "m"},
        {"python": "3.12", "torch": "2.11"},
        7,
    )
    row = dict(zip(results["result_columns"], results["results"][name], strict=False))
    impl_cpu, impl_cuda, torch_cpu, torch_cuda = row["result"]
    assert (impl_cpu, torch_cpu) == (2.0, None)
    assert math.isnan(impl_cuda)
    assert math.isnan(torch_cuda)
    assert row["stats_q_25"] == [1.0, None, None, None]
    assert row["params"] == [["'impl'", "'torch'"], ["'cpu'", "'cuda'"]]


def test_timing_stats_describe_the_samples() -> None:
    stats = single.timing_stats([float(n) for n in range(1, 102)], 3)
    assert (stats["result"], stats["q_25"], stats["q_75"]) == (51.0, 26.0, 76.0)
    assert stats["ci_99_a"] < 51.0 < stats["ci_99_b"]
    assert (stats["number"], stats["repeat"]) == (3, 101)
    assert single.timing_stats([2.0], 1)["q_75"] == 2.0


def test_benchmarks_are_planned_for_exactly_one_device() -> None:
    everything = [
        catalogue.name_of(kind, case)
        for kind in catalogue.load_all()
        for case in itertools.product(*kind.params)
    ]
    planned = [case.name for device in ("cpu", "cuda") for case in speed_phase.cases(device)]
    assert sorted(planned) == sorted(everything)
    assert all("cuda" in case.name for case in speed_phase.cases("cuda"))


@pytest.mark.parametrize(
    ("where", "last"), [("cpu", "bench_import"), ("cuda", "RatioCapturedAgainstCompiled")]
)
def test_headline_ratios_come_first_and_compiled_cases_last(where: str, last: str) -> None:
    planned = speed_phase.cases(where)
    headlines = [case for case in planned if case.is_headline and case.is_ratio and case.least_s < 1]
    assert planned[: len(headlines)] == headlines
    names = [case.name for case in planned]
    assert names[:2] == [
        f"{kind}[1000x1k, float32, kept, {where}]" for kind in ("RatioFusedAmpStep", "RatioAmpStep")
    ]
    assert names.index(f"RatioCapturedStep[1000x1k, fused, kept, {where}]") < 6
    assert names.index(f"RatioFusedAmpStep[gpt2, float32, kept, {where}]") < 20
    assert names.index(f"RatioRegion[plain, {where}]") > 20
    at_own_pace = [case for case in planned if case.least_s > 1]
    assert planned[-len(at_own_pace) :] == at_own_pace
    assert any(last in (case.kind.__name__, case.kind.__module__.split(".")[-1]) for case in at_own_pace)


def test_samples_time_only_the_call_and_end_in_time() -> None:
    class Slow(comparison.Absolute):
        number, repeat, warmup_time = 2, (5, 50, 2.0), 0.0
        params, param_names = [], []

        @staticmethod
        def workload(subject: str, *case: Any) -> Workload:
            raise NotImplementedError

        def setup(self) -> None:
            time.sleep(0.02)

        def time_call(self) -> None:
            pass

    began = time.perf_counter()
    samples = single.samples_of(Slow, (), most_s=0.3)
    assert time.perf_counter() - began < 10.0
    assert 1 <= len(samples) <= 8
    assert sorted(samples)[0] < 0.02


def test_operators_and_reads_are_counted() -> None:
    tensor = torch.ones(3)

    def call() -> None:
        tensor.mul_(2.0)
        torch.addmm(torch.ones(1, 1), torch.ones(1, 2), torch.ones(2, 1)).item()

    counts = launches.counted(Workload(call), "cpu")
    # Three calls of ones, mul_, addmm and item. Each counts once, although it calls other operators.
    assert counts == {"kernels": None, "copies": None, "synchronisations": None, "reads": 1, "operators": 6}


def test_device_events_are_distinguished_from_annotations() -> None:
    def event(name: str, start: float, end: float, on: DeviceType = DeviceType.CPU) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, device_type=on, cpu_parent=None, time_range=SimpleNamespace(start=start, end=end)
        )

    events = [
        event("tandem measured", 10, 50),
        event("Optimizer.step#AdamW.step", 20, 30),
        event("cuLaunchKernelEx", 21, 22),
        event("cudaStreamSynchronize", 25, 26),
        event("cudaStreamWaitEvent", 27, 28),
        event("aten::mul", 31, 32),
        event("cudaDeviceSynchronize", 51, 60),  # end of the measurement
        *(
            event(name, 55, 56, DeviceType.CUDA)
            for name in (
                "tandem measured",
                "Optimizer.step#AdamW.step",
                "unscale_kernel",
                "void multi_tensor<4>",
            )
        ),
        event("Memcpy DtoH (Device -> Pageable)", 57, 58, DeviceType.CUDA),
        event("Memset (Device)", 58, 59, DeviceType.CUDA),
    ]
    expected = {"kernels": 2, "copies": 2, "synchronisations": 1, "reads": 0, "operators": 1}
    assert launches.tally(events, cuda=True) == expected


@pytest.mark.parametrize(
    ("where", "cores", "gpus", "expected"),
    [("cpu", 2, 0, 2), ("cuda", 16, 1, 12), ("cuda", 64, 1, 12), ("cuda", 64, 4, 48), ("cuda", 1, 1, 1)],
)
def test_workers_of_a_host(where: str, cores: int, gpus: int, expected: int) -> None:
    assert judging_phase.workers(where, cores, gpus) == expected


def test_judge_command_follows_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    default = judging_phase.command(PhaseTask("rows.jsonl", 0.0, "cuda"), 1)
    assert {"--device=cuda", "--deadline=40", "--no-shrink", "--maxschedchunk=1"} <= set(default)
    assert "--deadline=120" in judging_phase.command(PhaseTask("rows.jsonl", 0.0, "cpu"), 0)
    assert default[default.index("-n") + 1] == "12"
    task = PhaseTask("rows.jsonl", 0.0, "cuda", devices="cuda,cpu", workers=3, deadline_s=9.5)
    requested = judging_phase.command(task, 1)
    assert {"--device=cuda,cpu", "--deadline=9.5"} <= set(requested)
    assert requested[requested.index("-n") + 1] == "3"


def test_judge_gives_tests_with_gpu_ranks_twice_the_time(tmp_path: Path) -> None:
    plugin = judge_plugin.Plugin(PhaseTask(str(tmp_path / "rows"), 0.0), reporter=None)

    def marked(own: float | None = None, **params: Any) -> list[float]:
        marks: list[float] = []
        item = SimpleNamespace(
            nodeid="conformance/t.py::t", callspec=SimpleNamespace(params=params),
            config=SimpleNamespace(option=SimpleNamespace(deadline=40.0)),
            get_closest_marker=lambda name: own, add_marker=lambda mark: marks.append(mark.args[0]),
        )  # fmt: skip
        plugin.pytest_collection_modifyitems([item])  # pyright: ignore[reportArgumentType]
        return marks

    assert marked(device="cuda", world_size=2) == [80.0]
    assert marked(device="cuda", world_size=2, own=120.0) == []
    assert marked(device="cuda") == []
    assert marked(device="cpu", world_size=2) == []


def test_ranks_option_selects_the_backend_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, expected in ((False, "gloo"), (True, "nccl")):
        monkeypatch.setattr("torch.distributed.is_nccl_available", lambda available=available: available)
        assert pool.backend_for("cuda") == expected
    assert [pool.backend_for(device) for device in ("cuda", "cpu")] == ["nccl", "gloo"]
    task = PhaseTask("rows.jsonl", 0.0, "cuda", ranks="gloo")
    monkeypatch.setenv(*next(item for item in judging_phase.environ(task).items() if item[1] == "gloo"))
    assert pool.backend_for("cuda") == "gloo"


def test_ranks_on_one_gpu_are_separate_hosts_for_nccl() -> None:
    first, second = (process.sharing_one_gpu(rank) for rank in (0, 1))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert first | {"NCCL_HOSTID": ""} == second | {"NCCL_HOSTID": ""}
    assert first["NCCL_NET"] == "Socket"


def test_judge_order_puts_the_most_valuable_tests_first() -> None:
    tests = [
        ("conformance/nn/utils/test_clip_grad_value.py::test_a[cuda]", True),
        ("conformance/amp/test_grad_scaler_unscale.py::test_a[cuda]", True),
        (
            "conformance/distributed/fsdp/test_fully_shard.py::test_training_matches_torch_and_unsharded[cuda-2]",
            True,
        ),
        ("conformance/distributed/fsdp/test_fsdp_no_sync.py::test_a[cuda-2]", True),
        ("conformance/distributed/fsdp/test_fsdp_state_dict.py::test_a[cuda-1]", True),
        ("conformance/amp/test_autocast_mode.py::test_a[cuda]", True),
        ("conformance/nn/utils/test_clip_grad_value.py::test_a", False),
    ]
    assert sorted(tests, key=lambda test: judge_order.stage_of(*test)) == tests


def test_each_pattern_of_the_judge_order_matches_a_file() -> None:
    paths = [path.as_posix() for path in (ROOT / "conformance").rglob("test_*.py")]
    stages = {judge_order.stage_of(path, has_device=True) for path in paths}
    assert stages == set(range(len(judge_order.STAGES) + 1))


@pytest.mark.deadline(200)
def test_workers_judge_the_most_valuable_tests_first(tmp_path: Path) -> None:
    tests = (
        "conformance/nn/utils/test_clip_grad_value.py",
        "conformance/amp/test_grad_scaler_fused_skips.py",
    )
    task = PhaseTask(str(tmp_path / "judge.jsonl"), 0.0, tests=" ".join(tests), workers=2)
    (tmp_path / "judge").mkdir()
    environ = {**os.environ, **judging_phase.environ(task)}
    subprocess.run(
        judging_phase.command(task, 0), cwd=ROOT, env=environ, capture_output=True, check=True, timeout=180
    )
    judged = read_rows(Path(task.rows))
    first = [name for name in judged.planned if "fused_skips" in name]
    assert judged.missing == []
    assert judged.planned[: len(first)] == first
    # A worker holds at most two tests, so a slow test delays only one other.
    done = [row["name"] for row in judged.rows]
    assert len(set(done[: len(first)]) & set(first)) >= len(first) - 2


def write_probe_rows(tmp_path: Path, outcomes: dict[str, str]) -> str:
    """Write the rows of a probe phase with these outcomes on two CPU ranks. Return the path of the file."""
    names = {planned.operation: planned.name for planned in probe.probes("cpu", 0)}
    rows = [{"planned": list(names.values())}]
    rows += [{"name": names[key], "outcome": outcome, "says": "why"} for key, outcome in outcomes.items()]
    file = tmp_path / "probe.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


WORKING = dict.fromkeys((*probed_operations.COLLECTIVES, "fully_shard"), "works")


@pytest.mark.parametrize(
    ("changes", "nn", "fsdp"),
    [
        ({"fsdp": "works"}, "", ""),
        ({"fsdp": "dies"}, "", "fsdp of 2 cpu gloo: dies why"),
        (
            {"all_reduce": "hangs"},
            "all_reduce of 2 cpu gloo: hangs why",
            "all_reduce of 2 cpu gloo: hangs why",
        ),
        ({}, "", "fsdp of 2 cpu gloo: its probe did not run"),
    ],
)
def test_failed_probe_makes_its_tests_unavailable(
    tmp_path: Path, changes: dict[str, str], nn: str, fsdp: str
) -> None:
    probe_failures = judge_plugin.probe_failures(write_probe_rows(tmp_path, WORKING | changes))
    assert judge_plugin.obstacle("conformance/nn/utils/test_x.py::test", "cpu", 2, probe_failures) == nn
    assert (
        judge_plugin.obstacle("conformance/distributed/fsdp/test_x.py::test", "cpu", 2, probe_failures)
        == fsdp
    )
    by_parameter = judge_plugin.obstacle(
        "conformance/distributed/fsdp/test_fully_shard_x.py::t", "cpu", 2, probe_failures
    )
    assert by_parameter == ("" if changes.get("all_reduce", "works") == "works" else fsdp)
    # A single CPU rank has no probe.
    assert judge_plugin.obstacle("conformance/nn/utils/test_x.py::test", "cpu", 1, probe_failures) == ""


def test_case_with_failed_probe_is_skipped_as_unavailable(tmp_path: Path) -> None:
    task = PhaseTask(
        str(tmp_path / "rows"), 0.0, probes=write_probe_rows(tmp_path, WORKING | {"broadcast": "dies"})
    )
    plugin = judge_plugin.Plugin(task, reporter=None)

    def set_up(**params: Any) -> None:
        plugin.pytest_runtest_setup(
            SimpleNamespace(nodeid="conformance/nn/t.py::t", callspec=SimpleNamespace(params=params))
        )  # pyright: ignore[reportArgumentType]

    set_up(device="cpu")
    set_up(device="cpu", world_size=1)
    with pytest.raises(pytest.skip.Exception, match=r"^unavailable: broadcast of 2 cpu gloo: dies why$"):
        set_up(device="cpu", world_size=2)


def test_ranks_start_before_the_test_that_uses_them(tmp_path: Path) -> None:
    plugin = judge_plugin.Plugin(PhaseTask(str(tmp_path / "rows"), 0.0), reporter=None)
    with pool.RankPool(1) as ranks:
        plugin.start_ranks(SimpleNamespace(funcargs={"rank_pool": ranks}))  # pyright: ignore[reportArgumentType]
        assert len(ranks.process_ids()) == 1
        ranks.run("conformance.gpu.probed_operations:barrier")
        assert ranks.starts == 1
    with pool.RankPool(1, start_s=0.0) as late:
        plugin.start_ranks(SimpleNamespace(funcargs={"rank_pool": late}))  # pyright: ignore[reportArgumentType]
        assert late.process_ids() == []
    plugin.start_ranks(SimpleNamespace(funcargs={}))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (RankDied("rank 1 died: killed by SIGSEGV", FaultRecord("case", 2)), "dies"),
        (RankHung("ranks [0, 1] were still inside", FaultRecord("case", 2)), "hangs"),
        (OSError("no file descriptors"), "fails"),
        (None, "wrong"),
    ],
)
def test_each_failure_of_a_probe_has_its_outcome(
    monkeypatch: pytest.MonkeyPatch, fault: Exception | None, outcome: str
) -> None:
    class Pool:
        def __init__(self, *arguments: Any, **options: Any) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *about: object) -> None: ...
        def run(self, case: str, **options: Any) -> list[list[torch.Tensor]]:
            if fault is not None:
                raise fault
            return [[torch.zeros(6)]] * 2

    monkeypatch.setattr(probe, "RankPool", Pool)
    actual, says = probe.outcome_of(probe.Probe("all_reduce", "cpu", "gloo", 2))
    assert actual == outcome
    assert (str(fault) if fault else "expected") in says


def test_several_gpus_are_probed_over_nccl_at_all_sizes() -> None:
    def groups(gpus: int) -> set[tuple[str, int]]:
        return {(planned.backend, planned.world_size) for planned in probe.probes("cuda", gpus)}

    assert groups(1) == {("gloo", 2), ("nccl", 1), ("nccl", 2)}
    assert groups(8) == {("gloo", 2), ("nccl", 1), ("nccl", 2), ("nccl", 8)}
