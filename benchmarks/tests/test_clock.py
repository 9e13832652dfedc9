"""The clock's verdict: what has become slower, by what it is judged, what is kept of a run, which commits are timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as clock
from benchmarks import benchmark_cases, decision, earlier, history, slowed
from benchmarks.decision import INCONCLUSIVE, MISSING, NEW, OK, REGRESSION, SUSPECT
from benchmarks.tests.clock_cases import MACHINE, measured, results
from conformance.report import speed as drawn
from conformance.report.verdict import parts, reasons
from conformance.selftests.report_cases import a_report

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
        ([0.5, 0.5, 0.1], [0.55], OK),  # one lucky point
        ([0.5, 0.1, 0.1], [0.55], SUSPECT),
        ([1.0], [1.5, 1.5, 1.5], REGRESSION),
    ],
)
def test_the_verdict_of_a_case(was: list[float], now: list[float], expected: str) -> None:
    assert decision.verdict(was, now) == expected


@pytest.mark.parametrize(
    ("was", "ratio", "torch_s", "expected"),
    [
        (0.02, 0.05, 1.0, OK),  # 30 ms longer, if two and a half times as long
        (0.02, 0.08, 1.0, REGRESSION),
        (0.02, 0.05, 2.0, REGRESSION),
        (0.50, 0.55, 9.0, OK),  # longer by half a second, and by no fifth
        (0.50, 0.65, 0.01, OK),
    ],
)
def test_what_is_done_once_must_take_longer_by_50_ms_too(
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


def test_only_suspects_are_measured_again_and_only_until_it_is_clear() -> None:
    asked: list[list[str]] = []
    again = iter([{"slow": 1.6, "lucky": 1.0, "gone": 1.6}, {"slow": 1.7}])

    def measure_again(names: list[str]) -> dict[str, float]:
        asked.append(names)
        return next(again)

    rows = [measured("slow", 1.5), measured("lucky", 1.5), measured("gone", 1.5), measured("even", 1.0)]
    rows += [measured("new", 5.0), {"name": "lost", "outcome": "not available"}]
    rows += [{"name": "broken", "outcome": "failed", "why": "it broke"}]
    decision.judge(
        rows, {name: [1.0] for name in ("slow", "lucky", "gone", "even", "lost", "broken")}, measure_again
    )
    assert asked == [["slow", "lucky", "gone"], ["slow", "gone"]]
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


def test_a_regression_is_a_reason_of_the_gate_and_noise_is_none() -> None:
    rows = [measured(name, 1.5) for name in ("slow", "noisy", "even")]
    reported = {"slow": (REGRESSION, [1.6, 1.7]), "noisy": (INCONCLUSIVE, [1.0]), "even": (OK, [])}
    for row in rows:
        verdict, again = reported[row["name"]]
        row |= {"low": 1.4, "high": 1.6, "verdict": verdict, "again": again, "was": 1.0}
        row["reported"] = decision.sentence(row)
    found = reasons(a_report(speed={"rows": rows, "against": "the points of m"}))
    assert found == ["regression of speed: slow was 1.00 × torch's time, now 1.50, 1.60, 1.70"]


def test_the_report_knows_the_words_of_the_clock() -> None:
    """It is drawn where there is no clock too."""
    words = (drawn.REGRESSION, drawn.MISSING, drawn.SURELY)
    assert words == (decision.REGRESSION, decision.MISSING, decision.SURELY)
    assert set(words[:2]) == set(decision.RED)


def test_cases_are_chosen_by_parts_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--quick", "--device=cpu", "--only=Clip", "--only=gpt2", "--without=Value", "--without=bfloat16"]
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks", *words])
    names = {benchmark_cases.name_of(kind, case) for kind, case in clock._cases(clock._options())}
    assert names
    assert all("Clip" in name and "gpt2" in name and "float32" in name for name in names)
    assert not any("Value" in name for name in names)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the points lie, none yet, on a machine that has made none."""
    for reader in (history.of_machine, history.points):
        monkeypatch.setattr(reader, "__defaults__", (tmp_path / "results",))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(clock, "_release", lambda: "2.13.0")
    return tmp_path / "results"


def test_points_judge_impl_alone(kept: Path) -> None:
    reported, ratios = earlier.of_points("m", "2.13.0", "impl", 9)
    assert reported["not_judged"].startswith("m has no earlier points with torch 2.13.0 (ci/bench makes one")
    assert ratios == {}
    for position, ratio in enumerate((0.4, 0.5)):
        history.add(results({"few": ratio}), MACHINE, str(position) * 40, position, kept)
    reported, ratios = earlier.of_points("m", "2.13.0", "impl", 9)
    assert reported == {"against": "the points of m with torch 2.13.0, the newest 11111111"}
    assert ratios == {"RatioClip[few]": [0.5, 0.4]}
    assert earlier.of_points("m", "2.13.0", "impl", 1)[1] == {"RatioClip[few]": [0.4]}
    reported, ratios = earlier.of_points("m", "2.13.0", "torch", 9)
    assert reported["not_judged"].startswith("points are impl's")
    assert ratios == {}
    assert earlier.of_points("", "2.13.0", "impl", 9)[1] == {}


def run_clock(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ratio: float, *words: str
) -> tuple[int, dict[str, Any]]:
    """`python -m benchmarks` on one case that takes as long whenever it is measured."""
    kind = SimpleNamespace(param_names=["shapes"])
    row = measured("RatioClip[few]", ratio) | {"low": ratio, "high": ratio, "pairs": 9}
    row |= {"subject_s": ratio, "reference_s": 1.0}
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks", f"--json={folder / 'speed.json'}", *words])
    monkeypatch.setattr(clock, "_cases", lambda options: [(kind, ("few",))])
    monkeypatch.setattr(benchmark_cases, "name_of", lambda kind, case: "RatioClip[few]")
    monkeypatch.setattr(benchmark_cases, "measured", lambda *_: (dict(row), None))
    monkeypatch.setattr(clock, "_measured_again", lambda options, names: dict.fromkeys(names, ratio))
    return clock.main(), json.loads((folder / "speed.json").read_text())


def test_a_machine_without_points_is_green_and_says_so(
    monkeypatch: pytest.MonkeyPatch, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history.add(results({"few": 0.1}), MACHINE, "a" * 40, 1_000, kept)
    code, report = run_clock(monkeypatch, kept, 0.9)
    assert (code, "against" in report) == (0, False)
    assert report["rows"][0]["elsewhere"] == {"m": 0.1}
    assert "verdict" not in report["rows"][0]
    reported = capsys.readouterr().out
    assert "speed: not judged: this machine has no points (" in reported
    assert "elsewhere (m)" in reported
    assert "0.100\n" in reported
    (speed,) = (part for part in parts(a_report(speed=report)) if part.name == "speed")
    assert (speed.outcome, speed.reasons) == ("passed", [])
    assert speed.says.startswith("not judged: this machine has no points (ci/bench makes one")
    assert reasons(a_report(speed=report)) == []


def test_a_slowdown_on_a_machine_with_points_is_red(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    history.add(results({"few": 0.6}), MACHINE, "a" * 40, 1_000, kept)
    history.add(results({"few": 9.0}), {"machine": "other"}, "b" * 40, 2_000, kept)
    code, report = run_clock(monkeypatch, kept, 0.9, "--machine=m")
    assert (code, report["rows"][0]["verdict"]) == (1, REGRESSION)
    assert report["rows"][0]["elsewhere"] == {"other": 9.0}
    assert reasons(a_report(speed=report)) == [
        "regression of speed: RatioClip[few] was 0.60 × torch's time, now 0.90, 0.90, 0.90"
    ]
    assert run_clock(monkeypatch, kept, 0.7, "--machine=m")[0] == 0


def test_a_slowdown_against_a_baseline_is_red_without_points(
    monkeypatch: pytest.MonkeyPatch, kept: Path, tmp_path: Path
) -> None:
    kept.mkdir()
    rows = [measured("RatioClip[few]", 0.6)]
    (tmp_path / "report.json").write_text(
        json.dumps({"subject": "impl", "speed": {"machine": clock._machine(), "rows": rows}})
    )
    code, report = run_clock(monkeypatch, kept, 0.9, f"--baseline={tmp_path / 'report.json'}")
    assert (code, report["against"]) == (1, "the baseline")


@pytest.mark.parametrize("words", [["--slow=1.5"], ["--subject=torch"]])
def test_a_point_is_of_impl_as_it_is(monkeypatch: pytest.MonkeyPatch, kept: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit):
        run_clock(monkeypatch, kept, 0.9, f"--point={kept / 'point.json'}", *words)


def test_a_baseline_judges_the_same_subject_on_the_same_machine() -> None:
    here = clock._machine()
    speed = {"machine": here, "rows": [measured("clip", 0.5), {"name": "x", "outcome": "failed"}]}
    whole = ({"against": "the baseline"}, {"clip": [0.5]})
    assert earlier.of_baseline({"subject": "mine", "speed": speed}, "mine", here) == whole
    assert earlier.of_baseline({"subject": "mine", **speed}, "mine", here) == whole  # of --json
    for report, why in (
        ({"subject": "impl", "speed": speed}, "the baseline differs in subject"),
        (
            {"subject": "mine", "speed": speed | {"machine": here | {"cores": -1}}},
            "the baseline differs in cores",
        ),
        ({"subject": "mine", "speed": {}}, "the baseline has no timings"),
    ):
        assert earlier.of_baseline(report, "mine", here) == ({"not_judged": why}, {})


def test_a_slowed_kernel_takes_so_many_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
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
