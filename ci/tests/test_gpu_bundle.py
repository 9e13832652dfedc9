"""Tests of `ci/gpu` without a device: the time of its phases, the bundle, and the results for asv."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import asv_format, catalogue, single, source
from conformance.gpu import __main__ as command
from conformance.gpu import bundle as bundles
from conformance.gpu import phases
from conformance.gpu.bundle import Bundle
from conformance.gpu.phase_rows import BENCHMARKS, PhaseRows, PhaseTask, read_rows
from conformance.gpu.phases import LEFT_OUT, OUT_OF_TIME, STOPPED, Clock, GpuPhase, PhaseRun
from conformance.judge.sandbox.marked_processes import marked_processes

ROOT = Path(__file__).parents[2]
HOST_ROW = {
    "name": "host",
    "outcome": "seen",
    "says": "a GPU",
    "cuda": True,
    "gpus": [{"name": "H|200", "capability": "sm_90", "memory_gib": 139.8, "multiprocessors": 132}],
    "cudnn": "91900",
    "nccl": "2.28.9",
    "machine": {"machine": "a-gpu", "os": "Linux", "arch": "x86_64", "cpu": "C", "num_cpu": "16"}
    | {"ram": "128 GiB", "gpu": "H200", "driver": "580"},
    "environment": {"python": "3.12.3", "system": "Linux", "processor": "C", "cores": 16, "cuda": "13.0"}
    | {"packages": {"torch": "2.11.0+cu130", "triton": "3.6.0"}},
}
PASSED = {"name": "t.py::test_a[cpu]", "outcome": "passed", "clause": "a.b", "replay": "", "reason": ""}
RED = PASSED | {
    "name": "t.py::test_b",
    "outcome": "hang",
    "red": True,
    "replay": "pytest t.py",
    "reason": "a | b <b>",
}
RATIO = {
    "name": "RatioUpdate[cpu]",
    "outcome": "measured",
    "benchmark": "RatioUpdate",
    "case": {"device": "'cpu'"},
    "values": {
        "bench_grad_scaler.RatioUpdate.track_ratio_vs_torch": {"result": 0.5},
        "bench_grad_scaler.RatioUpdate.track_noise": {"result": 0.01},
    },
    "ratio": 0.5,
    "low": 0.4,
    "high": 0.6,
    "pairs": 30,
}
TIMED = {
    "name": "Update[impl, cpu]",
    "outcome": "measured",
    "benchmark": "Update",
    "case": {"subject": "'impl'", "device": "'cpu'"},
    "values": {"bench_grad_scaler.Update.time_call": single.timing_stats([3e-6, 1e-6, 2e-6], 1)},
}


def stub(
    name: str, *entries: dict[str, Any], then: str = "", is_judging: bool = False, weight: float = 1.0
) -> GpuPhase:
    """Return a phase that has written `entries` and then runs the statements `then` in a fresh Python."""

    def command(task: PhaseTask) -> list[str]:
        Path(task.rows).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return [sys.executable, "-c", f"import json, signal, sys, time{then}", task.as_word()]

    return GpuPhase(name, weight, command, is_judging=is_judging, fixed_s=0.0)


@pytest.fixture
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_GRACE_S", 2.0)


def run_stubs(tmp_path: Path, *stubs: GpuPhase, budget_s: float = 60.0) -> Bundle:
    folder = tmp_path / "work"
    folder.mkdir()
    catalogue.describe_in(folder / BENCHMARKS)
    task = PhaseTask("", 0.0, "cpu")
    bundle = Bundle(task, folder, tmp_path / "bundle", budget_s, "ci/gpu --device cpu")
    phases.run_all(stubs, task, Clock(stubs, budget_s), folder, bundle.add)
    return bundle


def complete_run(tmp_path: Path, *tests: dict[str, Any]) -> Bundle:
    junit = (
        "\nfrom pathlib import Path\nfolder = Path(json.loads(sys.argv[1])['rows']).with_suffix('')\n"
        "folder.mkdir()\n(folder / 'junit.xml').write_text('<testsuites/>')\n"
        "(folder / 'report.json').write_text('{\"verdict\": \"green\"}')"
    )
    names = [test["name"] for test in tests]
    return run_stubs(
        tmp_path,
        stub("host", HOST_ROW, is_judging=True),
        stub("judge", {"planned": names}, *tests, then=junit, is_judging=True),
        stub("speed", {"planned": [RATIO["name"], TIMED["name"]]}, RATIO, TIMED),
    )


def read_strict_json(file: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{file.name} holds {constant}, which is not JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


def test_bundle_is_complete_flat_and_small(tmp_path: Path) -> None:
    out = complete_run(tmp_path, PASSED).out
    files = list(out.iterdir())
    expected = {"report.json", "summary.md", "junit.xml", "log.txt"}
    assert {file.name for file in files} == expected | {"point.json"}
    assert all(file.is_file() and re.fullmatch(r"[A-Za-z0-9._-]+", file.name) for file in files)
    assert len(files) <= 8
    assert sum(file.stat().st_size for file in files) < 1_000_000
    report = read_strict_json(out / "report.json")
    assert (report["verdict"], report["reasons"], report["not_shown"]) == ("green", [], [])
    assert report["phases"]["judge"]["rows"] == [PASSED]
    point = json.loads((out / "point.json").read_text())  # not strict: asv has NaN for n/a
    assert (point["machine"]["machine"], point["source"]["files"]) == ("a-gpu", report["files"])
    assert point["results"]["results"].keys() == RATIO["values"].keys() | TIMED["values"].keys()
    assert report["files"]["ci/gpu"] == source.files()["ci/gpu"]
    ElementTree.parse(out / "junit.xml")
    text = (out / "summary.md").read_text()
    for words in ("GREEN", "H|200, sm_90", "driver 580", "judge: 1 passed", "RatioUpdate[cpu] | 0.500"):
        assert words in text


def test_red_judgement_gives_exit_code_one(tmp_path: Path) -> None:
    bundle = complete_run(tmp_path, PASSED, RED)
    assert command._tell(bundle.write(), bundle.out) == 1
    report = read_strict_json(bundle.out / "report.json")
    assert (report["verdict"], report["reasons"]) == ("red", ["judge: 1 hang"])
    text = (bundle.out / "summary.md").read_text()
    assert "| 1 | hang | a \\| b &lt;b> | pytest t.py |" in text


def test_green_judgement_gives_exit_code_zero(tmp_path: Path) -> None:
    bundle = complete_run(tmp_path, PASSED)
    assert command._tell(bundle.write(), bundle.out) == 0


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.usefixtures("quick_end")
def test_phase_beyond_its_time_is_cut_and_named(tmp_path: Path, stubborn: bool) -> None:
    ignore = "\nsignal.signal(signal.SIGINT, signal.SIG_IGN)" if stubborn else ""
    began = time.monotonic()
    bundle = run_stubs(
        tmp_path,
        stub(
            "judge",
            {"planned": ["a", "b", "c"]},
            PASSED | {"name": "b"},
            then=ignore + "\ntime.sleep(60)",
            is_judging=True,
        ),
        budget_s=6.0,
    )
    assert time.monotonic() - began < 20.0  # less than the minute of sleep
    report = read_strict_json(bundle.out / "report.json")
    judge = report["phases"]["judge"]
    assert re.fullmatch(r"cut after \d s", judge["why"])
    assert judge["not_run"] == ["a", "c"]
    assert [row["name"] for row in judge["rows"]] == ["b"]
    assert (report["verdict"], report["not_shown"]) == ("not shown", [f"judge: {judge['why']}"])
    assert command._tell(report, bundle.out) == 1
    assert "| a, c |" in (bundle.out / "summary.md").read_text()


@pytest.mark.usefixtures("quick_end")
def test_phases_without_time_are_named(tmp_path: Path) -> None:
    stubs = [stub("a", then="\ntime.sleep(60)", weight=100.0), stub("b"), stub("c")]
    bundle = run_stubs(tmp_path, *stubs, budget_s=5.0)
    assert [ran.why for ran in bundle.ran] == ["cut after 3 s", OUT_OF_TIME, OUT_OF_TIME]
    assert [ran.not_run for ran in bundle.ran] == [["a"], ["b"], ["c"]]


def test_phase_that_ends_before_its_plan_says_so(tmp_path: Path) -> None:
    bundle = run_stubs(
        tmp_path, stub("speed", {"planned": ["x", "y"]}, {"name": "x", "outcome": "measured", "says": ""})
    )
    assert bundle.ran[0].why == "cut: 1 of 2 not run: out of time"
    assert bundle.ran[0].not_run == ["y"]
    assert bundle.report()["verdict"] == "not judged"


def test_broken_phase_makes_the_verdict_red(tmp_path: Path) -> None:
    bundle = run_stubs(
        tmp_path, stub("speed", then="\nprint('begun', flush=True)\nraise OSError('no driver')")
    )
    (reason,) = bundle.report()["reasons"]
    assert reason.startswith("speed ended with code 1: OSError: no driver\nbegun\nTraceback")


def test_error_in_the_summary_does_not_end_the_run(tmp_path: Path) -> None:
    bad = {"name": "x", "outcome": "counted"}  # lacks keys that the summary shows
    bundle = run_stubs(tmp_path, stub("launches", bad), stub("steps", PASSED))
    assert len(bundle.ran) == 2
    assert "KeyError" in (bundle.out / "summary.md").read_text()
    assert read_strict_json(bundle.out / "report.json")["phases"]["steps"]["rows"] == [PASSED]


def test_phase_that_was_left_out_is_not_a_reason() -> None:
    left_out = PhaseRun(stub("judge", is_judging=True), LEFT_OUT, not_run=["judge"])
    assert (bundles.reasons([left_out], ""), bundles.not_shown([left_out])) == ([], [])


def test_subject_without_judged_names_is_red() -> None:
    judge = PhaseRun(stub("judge", is_judging=True))
    assert bundles.reasons([judge], "red") == [
        "judge: the subject provides none of the names that are judged"
    ]


def test_unused_time_goes_to_later_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = [stub("a"), stub("b"), stub("c")]
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    clock = Clock(stubs, 540.0, began=90.0)
    ends = [clock.left_s(phase) + 10.0 for phase in stubs]
    assert ends == pytest.approx([ends[-1] / 3, ends[-1] * 2 / 3, ends[-1]])
    # A phase that ignores its interrupt ends later by the grace period, and the bundle must still be written.
    assert ends[-1] + phases._GRACE_S < 540.0


def test_fixed_time_comes_before_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dataclasses.replace(stub("first", weight=0.0), fixed_s=60.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    ends = [
        Clock([first, stub("a"), stub("b")], 540.0, began=0.0).left_s(stub(name))
        for name in ("first", "a", "b")
    ]
    assert ends[0] == 60.0
    assert ends[1] - ends[0] == pytest.approx(ends[2] - ends[1])
    assert ends[2] + phases._GRACE_S < 540.0


def test_short_budget_cuts_later_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    fixed = [dataclasses.replace(stub(name, weight=0.0), fixed_s=20.0) for name in ("a", "b", "c")]
    elastic = dataclasses.replace(stub("d"), fixed_s=10.0)
    short = Clock([*fixed, elastic], 60.0, began=0.0)
    ends = [short.left_s(phase) for phase in (*fixed, elastic)]
    assert ends[:2] == [20.0, 40.0]
    assert ends[2] == ends[3] < 60.0 - phases._GRACE_S
    assert short.shortage.startswith("the phases need about 79 s before")
    assert "; 60 s are given: later ones will be cut" in short.shortage
    assert Clock([*fixed, elastic], 80.0, began=0.0).shortage == ""


def test_time_beyond_needs_is_shared_if_no_phase_is_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    first, last = (dataclasses.replace(stub(name, weight=0.0), fixed_s=20.0) for name in ("a", "b"))
    first = dataclasses.replace(first, spare_s=30.0)
    clock = Clock([first, last], 540.0, began=0.0)
    usable_s = clock.left_s(last)
    assert usable_s > 500.0
    assert clock.left_s(first) == pytest.approx(20.0 + 30.0 + (usable_s - 70.0) / 2)
    # Time for a slow disk is at most a third of the time beyond the needs.
    tight = Clock([first, last, stub("c")], 80.0, began=0.0)
    rest_s = tight.left_s(stub("c")) - 40.0
    assert tight.left_s(first) == pytest.approx(20.0 + rest_s / 3)


def test_default_budget_suffices_for_the_needs_of_all_phases() -> None:
    phases = [command.WARM_UP, command.HOST, *command.phases(0), command._HOST_AGAIN]
    clock = Clock(phases, command._BUDGET_S)
    assert clock.needed_s < 0.6 * command._BUDGET_S
    assert {phase.name for phase in command.phases(0) if not phase.weight} == {
        "probe", "kernels", "waits", "values", "graphs", "launches", "bandwidth",
    }  # fmt: skip


def test_incomplete_row_leaves_other_rows_readable(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"planned": ["a", "b"]}\n{"name": "a", "outcome": "works"}\n{"name": "b", "outc')
    assert read_rows(file).missing == ["b"]
    assert read_rows(tmp_path / "none") == PhaseRows([], [])


def test_bundle_with_long_texts_stays_small(tmp_path: Path) -> None:
    long = [RED | {"name": f"t.py::test_{i}", "reason": "x" * 3_000} for i in range(2_000)]
    out = complete_run(tmp_path, *long).out
    report = read_strict_json(out / "report.json")
    assert len(report["phases"]["judge"]["rows"]) == len(long)
    assert sum(file.stat().st_size for file in out.iterdir()) < 4_000_000


def test_shortened_junit_file_stays_valid(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    case = f"<testcase><failure message='m'>{'x' * 5_000}</failure><system-out>{'y' * 999}</system-out></testcase>"
    file.write_text(f"<testsuites>{case * 500}</testsuites>")
    tree = ElementTree.fromstring(bundles._fitting_junit(file))
    texts = [failure.text or "" for failure in tree.iter("failure")]
    assert (len(texts), {len(text) for text in texts}, list(tree.iter("system-out"))) == (500, {300}, [])


@pytest.mark.deadline(120)
def test_description_of_benchmarks_matches_asv(tmp_path: Path) -> None:
    pytest.importorskip("asv_runner", reason="the extra `benchmarks` of pyproject.toml brings asv")
    program = "import sys; from asv_runner.discovery import _discover; _discover(sys.argv[1:])"
    file = tmp_path / "found.json"
    subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "benchmarks"), str(file)],
        cwd=tmp_path, timeout=100, check=True,
    )  # fmt: skip
    expected = {entry["name"]: entry for entry in json.loads(file.read_text())}
    actual = asv_format.describe_benchmarks(catalogue.load_all())
    assert actual.pop("version") == 2
    assert actual.keys() == expected.keys()
    for name, described in actual.items():
        compared = {key: value for key, value in described.items() if key != "code"}
        assert compared == {key: expected[name][key] for key in compared}


# The command


@pytest.mark.deadline(120)
def test_stopped_command_leaves_its_bundle_and_no_process(tmp_path: Path) -> None:
    mark = f"TANDEM_GPU_TEST={tmp_path}"
    process = subprocess.Popen(
        [sys.executable, ROOT / "ci/gpu", "--device", "cpu", "--out", tmp_path / "out", "--only", "probe"],
        env={**os.environ, "TANDEM_GPU_TEST": str(tmp_path)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith("   all_reduce"):  # first row of running ranks
                process.terminate()
        assert process.wait(30) == 1
    probe = read_strict_json(tmp_path / "out/report.json")["phases"]["probe"]
    assert probe["why"] == STOPPED
    assert "fsdp of 2 cpu gloo" in probe["not_run"]
    wait_until(lambda: not marked_processes(mark), 20)


def wait_until(holds: Callable[[], bool], most_s: float) -> None:
    end = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < end, f"the condition is false after {most_s:g} s"
        time.sleep(0.05)


def ci_gpu(tmp_path: Path, *words: str, **environ: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, ROOT / "ci/gpu", "--device", "cpu", "--out", tmp_path / "out", *words],
        cwd=tmp_path, env={**os.environ, **environ}, capture_output=True, text=True, timeout=330, check=False,
    )  # fmt: skip
    assert (tmp_path / "out/report.json").is_file(), done.stdout + done.stderr
    return done.returncode, read_strict_json(tmp_path / "out/report.json")


@pytest.mark.deadline(360)
def test_command_judges_a_wrong_subject_red(tmp_path: Path) -> None:
    package = tmp_path / "wrongly" / "nn" / "utils"
    package.mkdir(parents=True)
    for folder in (package.parents[1], package.parents[0]):
        (folder / "__init__.py").write_text("")
    (package / "__init__.py").write_text("def clip_grad_norm_(parameters): ...\n")
    code, report = ci_gpu(
        tmp_path, *("--only", "judge", "--subject", "wrongly"), *("--tests", "conformance/test_surface.py"),
        *("--budget", "300"), PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )  # fmt: skip
    assert (code, report["verdict"]) == (1, "red"), report["phases"]["judge"]["why"]
    failed = [row["name"] for row in report["phases"]["judge"]["rows"] if row["outcome"] == "failed"]
    assert any("clip_grad_norm_" in name for name in failed)
    assert report["phases"]["speed"]["why"] == LEFT_OUT


@pytest.mark.deadline(200)
def test_command_keeps_its_budget(tmp_path: Path) -> None:
    began = time.monotonic()
    code, report = ci_gpu(tmp_path, "--only", "speed", "--only", "judge", "--budget", "15")
    # A busy machine may take long to write the bundle and to exit.
    assert time.monotonic() - began < 30.0
    assert (code, report["verdict"]) == (1, "not shown")
    assert all(report["phases"][name]["not_run"] for name in ("judge", "speed"))
