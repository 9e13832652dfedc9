"""The clock's verdict: what has become slower, by what it is judged, what is kept of a run, which commits are timed."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as clock
from benchmarks import catalogue, decision, earlier, history, slowed
from benchmarks.decision import INCONCLUSIVE, MISSING, NEW, OK, REGRESSION, SUSPECT
from conformance.judge.judgement import unavailable
from conformance.report import speed as drawn
from conformance.report.verdict import parts, reasons
from conformance.selftests.clock_cases import CI, MACHINE, git, loaded, measured, results
from conformance.selftests.report_cases import a_report

pytestmark = pytest.mark.deadline(60)


@pytest.mark.parametrize(
    ("was", "now", "wanted"),
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
def test_the_verdict_of_a_case(was: list[float], now: list[float], wanted: str) -> None:
    assert decision.verdict(was, now) == wanted


@pytest.mark.parametrize(
    ("was", "ratio", "torch_s", "wanted"),
    [
        (0.02, 0.05, 1.0, OK),  # 30 ms longer, if two and a half times as long
        (0.02, 0.08, 1.0, REGRESSION),
        (0.02, 0.05, 2.0, REGRESSION),
        (0.50, 0.55, 9.0, OK),  # longer by half a second, and by no fifth
        (0.50, 0.65, 0.01, OK),
    ],
)
def test_what_is_done_once_must_take_longer_by_50_ms_too(
    was: float, ratio: float, torch_s: float, wanted: str
) -> None:
    row = measured("x", ratio) | {"reference_s": torch_s}
    rows = [row | {"name": "once", "is_one_off": True}, row | {"name": "each step"}]
    decision.judge(
        rows, {name: [was] for name in ("once", "each step")}, lambda names: dict.fromkeys(names, ratio)
    )
    once, each_step = (row["verdict"] for row in rows)
    assert once == wanted
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
    told = {"slow": (REGRESSION, [1.6, 1.7]), "noisy": (INCONCLUSIVE, [1.0]), "even": (OK, [])}
    for row in rows:
        verdict, again = told[row["name"]]
        row |= {"low": 1.4, "high": 1.6, "verdict": verdict, "again": again, "was": 1.0}
        row["told"] = decision.sentence(row)
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
    names = {catalogue.name_of(kind, case) for kind, case in clock._cases(clock._options())}
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
    told, ratios = earlier.of_points("m", "2.13.0", "impl", 9)
    assert told["not_judged"].startswith("m has no earlier points with torch 2.13.0 (ci/bench makes one")
    assert ratios == {}
    for position, ratio in enumerate((0.4, 0.5)):
        history.add(results({"few": ratio}), MACHINE, str(position) * 40, position, kept)
    told, ratios = earlier.of_points("m", "2.13.0", "impl", 9)
    assert told == {"against": "the points of m with torch 2.13.0, the newest 11111111"}
    assert ratios == {"RatioClip[few]": [0.5, 0.4]}
    assert earlier.of_points("m", "2.13.0", "impl", 1)[1] == {"RatioClip[few]": [0.4]}
    told, ratios = earlier.of_points("m", "2.13.0", "torch", 9)
    assert told["not_judged"].startswith("points are impl's")
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
    monkeypatch.setattr(catalogue, "name_of", lambda kind, case: "RatioClip[few]")
    monkeypatch.setattr(catalogue, "measured", lambda *_: (dict(row), None))
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
    said = capsys.readouterr().out
    assert "speed: not judged: this machine has no points (" in said
    assert "elsewhere (m)" in said
    assert "0.100\n" in said
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


# Commits


@pytest.fixture
def ci_history(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("_history")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Five commits, of which the first, the third and the fifth touch impl; the third's impl cannot be imported."""
    root = tmp_path / "repository"
    (root / "impl").mkdir(parents=True)
    (root / "benchmarks").mkdir()
    (root / "benchmarks" / "now.py").write_text("")
    git(root, "init", "-q", "-b", "main")
    for number in range(5):
        own = root / ("impl/__init__.py" if number % 2 == 0 else "notes")
        own.write_text("1 / 0" if number == 2 else f"number = {number}")
        git(root, "add", own)
        git(root, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", f"commit {number}")
    return root


def test_history_takes_the_last_commits_that_touch_impl(ci_history: ModuleType, repository: Path) -> None:
    told = [ci_history.subject_of(commit, repository) for commit in ci_history.commits_of_impl(2, repository)]
    assert [line.split(" ", 1)[1] for line in told] == ["commit 4", "commit 2"]
    assert len(ci_history.commits_of_impl(99, repository)) == 3


def test_history_skips_what_has_numbers_of_this_machine(
    ci_history: ModuleType, repository: Path, tmp_path: Path
) -> None:
    newest, *others = ci_history.commits_of_impl(99, repository)
    history.add(results({"few": 0.5}), MACHINE, newest, 1, tmp_path / "results")
    assert ci_history.unmeasured([newest, *others], tmp_path / "results" / "m") == others
    assert ci_history.unmeasured([newest], tmp_path / "results" / "another machine") == [newest]


def test_a_worktree_has_impl_of_then_and_benchmarks_of_now(
    ci_history: ModuleType, repository: Path, tmp_path: Path
) -> None:
    *_, oldest = ci_history.commits_of_impl(99, repository)
    left = tmp_path / "trees" / oldest[:12]
    left.mkdir(parents=True)  # by a run that was killed
    with ci_history.worktree(oldest, tmp_path / "trees", repository) as tree:
        assert (tree / "impl" / "__init__.py").read_text() == "number = 0"
        assert (tree / "benchmarks" / "now.py").is_file()
        assert not (tree / "notes").exists()
        ci_history.require_impl_of(tree, Path(sys.executable), {})
    assert not left.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert git(repository, "status", "--porcelain", "--", "impl") == ""


def test_a_worktree_goes_when_the_run_is_stopped(
    ci_history: ModuleType, repository: Path, tmp_path: Path
) -> None:
    def stopped() -> None:
        with ci_history.worktree("HEAD", tmp_path / "trees", repository):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list((tmp_path / "trees").iterdir()) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_an_impl_from_elsewhere_is_not_timed(
    ci_history: ModuleType, repository: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RuntimeError, match=r"came from: .*repository/impl"):
        ci_history.require_impl_of(empty, Path(sys.executable), {"PYTHONPATH": str(repository)})
    broken = ci_history.commits_of_impl(99, repository)[1]
    with (
        ci_history.worktree(broken, tmp_path / "trees", repository) as tree,
        pytest.raises(RuntimeError, match="ZeroDivisionError"),
    ):
        ci_history.require_impl_of(tree, Path(sys.executable), {})


def test_a_commit_is_timed_with_its_own_library(
    ci_history: ModuleType, repository: Path, tmp_path: Path
) -> None:
    if shutil.which("cc") is None:
        unavailable("no C compiler")
    native = repository / "impl" / "kernels" / "_native"
    native.mkdir(parents=True)
    (native / "one.c").write_text("int one(void) { return 1; }")
    (repository / "README.md").write_text("")
    (repository / "LICENSE").write_text("")
    (repository / "pyproject.toml").write_text(
        '[project]\nname = "p"\nversion = "1"\n[tool.setuptools]\npackages = []\n[[tool.setuptools.ext-modules]]\n'
        'name = "impl.kernels._native._library"\nsources = ["impl/kernels/_native/one.c"]\n'
    )
    git(repository, "add", ".")
    git(repository, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "a library")
    newest, *_, without = ci_history.commits_of_impl(99, repository)
    for commit, built in ((newest, 1), (without, 0)):
        with ci_history.worktree(commit, tmp_path / "trees", repository) as tree:
            ci_history.build_library(tree, commit, Path(sys.executable))
            assert len(list(tree.glob("impl/kernels/_native/_library.*"))) == built


def test_a_commit_that_is_none_is_told(ci_history: ModuleType, repository: Path) -> None:
    assert ci_history.commit_named("main", repository) == git(repository, "rev-parse", "HEAD")
    with pytest.raises(ValueError, match="'nonsense' names no commit"):
        ci_history.commit_named("nonsense", repository)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], "always"),
        (["--quick"], "never"),
        (["--history=1"], "if whole"),
        (["--history=1", "--only=Clip", "--without=Fsdp"], "if whole"),
    ],
)
def test_what_is_kept_of_a_run(
    monkeypatch: pytest.MonkeyPatch, ci_history: ModuleType, words: list[str], kept: str, stopped: bool
) -> None:
    bench = loaded("bench")
    added: list[Any] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        file = next(word.removeprefix("--point=") for word in command if word.startswith("--point="))
        Path(file).write_text("{}")
        assert {word for word in words if "history" not in word} <= set(command)
        assert ("--machine=own" in command) == ("--quick" not in words)
        if stopped:
            raise KeyboardInterrupt
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(sys, "argv", ["ci/bench", *words])
    monkeypatch.setattr(bench._environment, "enter", lambda extras: {})
    monkeypatch.setattr(bench, "draw", lambda environ: 0)
    monkeypatch.setattr(bench, "warn_of_changes", lambda: None)
    monkeypatch.setattr(bench, "make_own_name", lambda: "own")
    monkeypatch.setattr(bench, "add", lambda numbers, commit: added.append(numbers))
    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    for name, answer in {
        "commit_named": "a" * 40,
        "date_ms": 1,
        "commits_of_impl": ["a" * 40],
        "unmeasured": ["a" * 40],
        "subject_of": "a commit",
        "require_impl_of": None,
        "build_library": None,
        "worktree": contextlib.nullcontext(Path()),
    }.items():
        monkeypatch.setattr(ci_history, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=run))
    assert bench.main() == (130 if stopped else 0)
    assert bool(added) == {"always": True, "never": False, "if whole": not stopped}[kept]
