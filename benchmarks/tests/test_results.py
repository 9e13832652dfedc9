"""Tests of the verdict on speed: regressions, the results to judge by, and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import catalogue, decision, earlier, history, slowed
from benchmarks.decision import INCONCLUSIVE, MISSING, NEW, OK, REGRESSION, SUSPECT
from benchmarks.tests.sample_results import MACHINE, measured, results
from conformance.report import speed as drawn
from conformance.report.verdict import parts, reasons
from conformance.selftests.sample_reports import a_report

pytestmark = pytest.mark.deadline(60)


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        ([], [9.0], NEW),
        ([0.5], [], MISSING),
        ([0.5], [0.5], OK),
        ([0.5], [0.59], OK),
        ([0.5], [0.61], SUSPECT),
        ([0.5], [0.61, 0.62], SUSPECT),
        ([0.5], [0.61, 0.62, 0.63], REGRESSION),
        ([0.5], [0.61, 0.59], INCONCLUSIVE),
        ([0.5], [0.61, 0.62, 0.59], INCONCLUSIVE),
        ([0.5, 0.5, 0.1], [0.55], OK),  # a lucky result
        ([0.5, 0.1, 0.1], [0.55], SUSPECT),
        ([1.0], [1.5, 1.5, 1.5], REGRESSION),
    ],
)
def test_verdict_of_a_case(was: list[float], now: list[float], expected: str) -> None:
    assert decision.verdict(was, now) == expected


@pytest.mark.parametrize(
    ("was", "ratio", "torch_s", "expected"),
    [
        (0.02, 0.05, 1.0, OK),  # 30 ms longer, although 2.5 times as long
        (0.02, 0.08, 1.0, REGRESSION),
        (0.02, 0.05, 2.0, REGRESSION),
        (0.50, 0.55, 9.0, OK),  # half a second longer, less than a fifth
        (0.50, 0.65, 0.01, OK),
    ],
)
def test_regression_of_one_off_work_needs_50_ms(
    was: float, ratio: float, torch_s: float, expected: str
) -> None:
    row = measured("x", ratio) | {"reference_s": torch_s}
    rows = [row | {"name": "once", "is_one_off": True}, row | {"name": "each step"}]
    decision.judge(
        rows, {name: [was] for name in ("once", "each step")}, lambda names: dict.fromkeys(names, ratio)
    )
    once, each_step = (row["verdict"] for row in rows)
    assert once == expected
    assert each_step == (REGRESSION if ratio > 1.2 * was else OK)


def test_suspects_are_measured_again_until_the_verdict_is_clear() -> None:
    requested: list[list[str]] = []
    again = iter([{"slow": 1.6, "lucky": 1.0, "gone": 1.6}, {"slow": 1.7}])

    def measure_again(names: list[str]) -> dict[str, float]:
        requested.append(names)
        return next(again)

    rows = [measured("slow", 1.5), measured("lucky", 1.5), measured("gone", 1.5), measured("even", 1.0)]
    rows += [measured("new", 5.0), {"name": "lost", "outcome": "not available"}]
    rows += [{"name": "broken", "outcome": "failed", "why": "it broke"}]
    decision.judge(
        rows, {name: [1.0] for name in ("slow", "lucky", "gone", "even", "lost", "broken")}, measure_again
    )
    assert requested == [["slow", "lucky", "gone"], ["slow", "gone"]]
    assert {row["name"]: row.get("verdict") for row in rows} == {
        "slow": REGRESSION,
        "lucky": INCONCLUSIVE,
        "gone": SUSPECT,
        "even": OK,
        "new": NEW,
        "lost": MISSING,
        "broken": None,
    }
    assert rows[0] | {"was": 1.0, "again": [1.6, 1.7]} == rows[0]


def test_gate_reports_regressions_and_ignores_noise() -> None:
    rows = [measured(name, 1.5) for name in ("slow", "noisy", "even")]
    reported = {"slow": (REGRESSION, [1.6, 1.7]), "noisy": (INCONCLUSIVE, [1.0]), "even": (OK, [])}
    for row in rows:
        verdict, again = reported[row["name"]]
        row |= {"low": 1.4, "high": 1.6, "verdict": verdict, "again": again, "was": 1.0}
        row["reported"] = decision.sentence(row)
    actual = reasons(a_report(speed={"rows": rows, "against": "the results of m"}))
    assert actual == ["regression of speed: slow was 1.00 × torch's time, now 1.50, 1.60, 1.70"]


def test_report_has_the_verdicts_of_the_benchmarks() -> None:
    """The report has its own copies, because it is also drawn without the benchmarks."""
    words = (drawn.REGRESSION, drawn.MISSING, drawn.SURELY)
    assert words == (decision.REGRESSION, decision.MISSING, decision.SURELY)
    assert set(words[:2]) == set(decision.RED)


def test_only_and_without_select_cases_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--quick", "--device=cpu", "--only=Clip", "--only=gpt2", "--without=Value", "--without=bfloat16"]
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks", *words])
    names = {catalogue.name_of(kind, case) for kind, case in command._cases(command._options())}
    assert names
    assert all("Clip" in name and "gpt2" in name and "float32" in name for name in names)
    assert not any("Value" in name for name in names)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty folder of recorded results, on a machine without a name."""
    for reader in (history.of_machine, history.points):
        monkeypatch.setattr(reader, "__defaults__", (tmp_path / "results",))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(command, "_release", lambda: "2.13.0")
    return tmp_path / "results"


def test_recorded_results_judge_only_impl(folder: Path) -> None:
    reported, ratios = earlier.of_points("m", "2.13.0", "impl", 9)
    assert reported["not_judged"].startswith(
        "m has no earlier recorded results with torch 2.13.0 (record one by"
    )
    assert ratios == {}
    for position, ratio in enumerate((0.4, 0.5)):
        history.add(results({"few": ratio}), MACHINE, str(position) * 40, position, folder)
    reported, ratios = earlier.of_points("m", "2.13.0", "impl", 9)
    assert reported == {"against": "the recorded results of m with torch 2.13.0, the newest 11111111"}
    assert ratios == {"RatioClip[few]": [0.5, 0.4]}
    assert earlier.of_points("m", "2.13.0", "impl", 1)[1] == {"RatioClip[few]": [0.4]}
    reported, ratios = earlier.of_points("m", "2.13.0", "torch", 9)
    assert reported["not_judged"].startswith("results are recorded of impl")
    assert ratios == {}
    assert earlier.of_points("", "2.13.0", "impl", 9)[1] == {}


def run_benchmarks(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ratio: float, *words: str
) -> tuple[int, dict[str, Any]]:
    """Run `python -m benchmarks` on a case that always has the same ratio. Return the exit code and the report."""
    kind = SimpleNamespace(param_names=["shapes"])
    row = measured("RatioClip[few]", ratio) | {"low": ratio, "high": ratio, "pairs": 9}
    row |= {"subject_s": ratio, "reference_s": 1.0}
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks", f"--json={folder / 'speed.json'}", *words])
    monkeypatch.setattr(command, "_cases", lambda options: [(kind, ("few",))])
    monkeypatch.setattr(catalogue, "name_of", lambda kind, case: "RatioClip[few]")
    monkeypatch.setattr(catalogue, "measure_case", lambda *_: (dict(row), None))
    monkeypatch.setattr(command, "_measure_again", lambda options, names: dict.fromkeys(names, ratio))
    return command.main(), json.loads((folder / "speed.json").read_text())


def test_machine_without_results_is_green_and_not_judged(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history.add(results({"few": 0.1}), MACHINE, "a" * 40, 1_000, folder)
    code, report = run_benchmarks(monkeypatch, folder, 0.9)
    assert (code, "against" in report) == (0, False)
    assert report["rows"][0]["elsewhere"] == {"m": 0.1}
    assert "verdict" not in report["rows"][0]
    reported = capsys.readouterr().out
    assert "speed: not judged: this machine has no recorded results (" in reported
    assert "elsewhere (m)" in reported
    assert "0.100\n" in reported
    (speed,) = (part for part in parts(a_report(speed=report)) if part.name == "speed")
    assert (speed.outcome, speed.reasons) == ("passed", [])
    assert speed.says.startswith("not judged: this machine has no recorded results (record one by")
    assert reasons(a_report(speed=report)) == []


def test_slowdown_on_a_machine_with_results_is_red(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    history.add(results({"few": 0.6}), MACHINE, "a" * 40, 1_000, folder)
    history.add(results({"few": 9.0}), {"machine": "other"}, "b" * 40, 2_000, folder)
    code, report = run_benchmarks(monkeypatch, folder, 0.9, "--machine=m")
    assert (code, report["rows"][0]["verdict"]) == (1, REGRESSION)
    assert report["rows"][0]["elsewhere"] == {"other": 9.0}
    assert reasons(a_report(speed=report)) == [
        "regression of speed: RatioClip[few] was 0.60 × torch's time, now 0.90, 0.90, 0.90"
    ]
    assert run_benchmarks(monkeypatch, folder, 0.7, "--machine=m")[0] == 0


def test_slowdown_against_a_baseline_is_red_without_results(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    folder.mkdir()
    rows = [measured("RatioClip[few]", 0.6)]
    (tmp_path / "report.json").write_text(
        json.dumps({"subject": "impl", "speed": {"machine": command._machine(), "rows": rows}})
    )
    code, report = run_benchmarks(monkeypatch, folder, 0.9, f"--baseline={tmp_path / 'report.json'}")
    assert (code, report["against"]) == (1, "the baseline")


@pytest.mark.parametrize("words", [["--slow=1.5"], ["--subject=torch"]])
def test_point_is_refused_for_changed_or_other_subject(
    monkeypatch: pytest.MonkeyPatch, folder: Path, words: list[str]
) -> None:
    with pytest.raises(SystemExit):
        run_benchmarks(monkeypatch, folder, 0.9, f"--point={folder / 'point.json'}", *words)


def test_baseline_judges_only_the_same_subject_and_machine() -> None:
    here = command._machine()
    speed = {"machine": here, "rows": [measured("clip", 0.5), {"name": "x", "outcome": "failed"}]}
    expected = ({"against": "the baseline"}, {"clip": [0.5]})
    assert earlier.of_baseline({"subject": "mine", "speed": speed}, "mine", here) == expected
    assert earlier.of_baseline({"subject": "mine", **speed}, "mine", here) == expected  # file of --json
    for report, why in (
        ({"subject": "impl", "speed": speed}, "the baseline differs in subject"),
        (
            {"subject": "mine", "speed": speed | {"machine": here | {"cores": -1}}},
            "the baseline differs in cores",
        ),
        ({"subject": "mine", "speed": {}}, "the baseline has no timings"),
    ):
        assert earlier.of_baseline(report, "mine", here) == ({"not_judged": why}, {})


def test_slowed_kernel_takes_longer_by_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def look() -> float:
        nonlocal now_s
        now_s += 0.001
        return now_s

    def kernel(value: int) -> int:
        nonlocal now_s
        now_s += 10.0
        return value + 1

    monkeypatch.setattr(slowed, "time", SimpleNamespace(perf_counter=look))
    assert slowed._slowed(kernel, 1.5)(1) == 2
    assert now_s == pytest.approx(15.0, abs=0.01)
