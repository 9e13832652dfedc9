"""Tests of `ci/bench` and `ci/check`: commits, recorded results and pages. Nothing is timed here."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import history
from benchmarks.tests.sample_results import CI, MACHINE, git, load_command, results
from conformance.judge.judgement import unavailable


@pytest.fixture
def ci_history(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("_history")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Repository of five commits. The first, third and fifth change impl, and the third's impl cannot be imported."""
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


def test_history_takes_the_last_commits_of_impl(ci_history: ModuleType, repository: Path) -> None:
    reported = [
        ci_history.subject_of(commit, repository) for commit in ci_history.commits_of_impl(2, repository)
    ]
    assert [line.split(" ", 1)[1] for line in reported] == ["commit 4", "commit 2"]
    assert len(ci_history.commits_of_impl(99, repository)) == 3


def test_history_skips_commits_with_results_of_this_machine(
    ci_history: ModuleType, repository: Path, tmp_path: Path
) -> None:
    newest, *others = ci_history.commits_of_impl(99, repository)
    history.add(results({"few": 0.5}), MACHINE, newest, 1, tmp_path / "results")
    assert ci_history.unmeasured([newest, *others], tmp_path / "results" / "m") == others
    assert ci_history.unmeasured([newest], tmp_path / "results" / "another machine") == [newest]


def test_worktree_has_impl_of_the_commit_and_current_benchmarks(
    ci_history: ModuleType, repository: Path, tmp_path: Path
) -> None:
    *_, oldest = ci_history.commits_of_impl(99, repository)
    left = tmp_path / "trees" / oldest[:12]
    left.mkdir(parents=True)  # leftover of a killed run
    with ci_history.worktree(oldest, tmp_path / "trees", repository) as tree:
        assert (tree / "impl" / "__init__.py").read_text() == "number = 0"
        assert (tree / "benchmarks" / "now.py").is_file()
        assert not (tree / "notes").exists()
        ci_history.require_impl_of(tree, Path(sys.executable), {})
    assert not left.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert git(repository, "status", "--porcelain", "--", "impl") == ""


def test_worktree_is_removed_if_the_run_is_stopped(
    ci_history: ModuleType, repository: Path, tmp_path: Path
) -> None:
    def stopped() -> None:
        with ci_history.worktree("HEAD", tmp_path / "trees", repository):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list((tmp_path / "trees").iterdir()) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_impl_from_another_folder_is_not_timed(
    ci_history: ModuleType, repository: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RuntimeError, match=r"got: .*repository/impl"):
        ci_history.require_impl_of(empty, Path(sys.executable), {"PYTHONPATH": str(repository)})
    broken = ci_history.commits_of_impl(99, repository)[1]
    with (
        ci_history.worktree(broken, tmp_path / "trees", repository) as tree,
        pytest.raises(RuntimeError, match="ZeroDivisionError"),
    ):
        ci_history.require_impl_of(tree, Path(sys.executable), {})


def test_commit_is_timed_with_its_own_library(
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


def test_unknown_commit_is_reported(ci_history: ModuleType, repository: Path) -> None:
    assert ci_history.commit_named("main", repository) == git(repository, "rev-parse", "HEAD")
    with pytest.raises(ValueError, match="'nonsense' is not a commit"):
        ci_history.commit_named("nonsense", repository)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
    ("words", "recorded"),
    [
        ([], "always"),
        (["--quick"], "never"),
        (["--history=1"], "if whole"),
        (["--history=1", "--only=Clip", "--without=Fsdp"], "if whole"),
    ],
)
def test_run_is_recorded_by_its_mode(
    monkeypatch: pytest.MonkeyPatch, ci_history: ModuleType, words: list[str], recorded: str, stopped: bool
) -> None:
    bench = load_command("bench")
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
    assert bool(added) == {"always": True, "never": False, "if whole": not stopped}[recorded]


def test_regression_prints_an_issue_and_opens_none(
    monkeypatch: pytest.MonkeyPatch,
    ci_history: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    bench = load_command("bench")
    monkeypatch.setattr(history, "RESULTS", tmp_path)
    monkeypatch.setattr(history.points, "__defaults__", (tmp_path,))
    monkeypatch.setattr(history.of_machine, "__defaults__", (tmp_path,))
    monkeypatch.setattr(ci_history, "date_ms", lambda commit: 2)
    traits = {"cpu": "C", "num_cpu": "2", "gpu": "none"}
    contents = [results({"few": ratio}) for ratio in (0.5, 0.9)]
    for content in contents:
        content["params"] |= traits
    for date_ms, (commit, content) in enumerate(zip("ab", contents, strict=True), 1):
        history.add(content, MACHINE, commit * 40, date_ms, tmp_path)
    row = {"name": "RatioClip[few]", "outcome": "measured", "ratio": 0.9, "was": 0.5, "again": [0.9, 0.9]}
    measured = {"results": contents[1], "machine": MACHINE}
    for verdict, titles in (("ok", 0), ("regression", 1)):
        row |= {
            "verdict": verdict,
            "reported": "RatioClip[few] was 0.50 × torch's time, now 0.90, 0.90, 0.90",
        }
        bench.print_issue({"rows": [row]}, measured, "b" * 40)
        printed = capsys.readouterr()
        assert printed.out.count("Title: RatioClip[few] was 0.50") == titles
        assert ("it has not been opened" in printed.err) == bool(titles)
    assert (
        "at aaaaaaaa | 0.90, 0.90, 0.90 × torch (5.4 s, torch 6 s) at bbbbbbbb | +2.4 s | code |"
        in printed.out
    )


def test_since_prints_movers_without_timing(
    monkeypatch: pytest.MonkeyPatch,
    ci_history: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    bench = load_command("bench")
    monkeypatch.setattr(history.points, "__defaults__", (tmp_path,))
    monkeypatch.setattr(ci_history, "commit_named", lambda name: name)
    monkeypatch.setattr(ci_history, "date_ms", {"b" * 40: 2}.get)
    for date_ms, (commit, ratio) in enumerate((("a", 0.5), ("b", 0.6), ("c", 0.9)), 1):
        history.add(results({"few": ratio}, noise=0.0), MACHINE, commit * 40, date_ms, tmp_path)
    for words, expected in (([], "+2.4 s | 0.50 → 0.90 | aaaaaaaa → cccccccc"), (["b" * 40], "0.60 → 0.90")):
        monkeypatch.setattr(sys, "argv", ["ci/bench", "--since", *words])
        assert bench.main() == 0
        assert expected in capsys.readouterr().out


def point(commit: str) -> history.Point:
    return history.Point(Path(), "amd", commit, 2, {}, {})


@pytest.fixture
def freshness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("_freshness")


@pytest.fixture
def commits(tmp_path: Path) -> list[str]:
    """Thirteen commits of a repository at `tmp_path`, oldest first. All but the last change impl."""
    (tmp_path / "impl").mkdir()
    git(tmp_path, "init", "-q", "-b", "main")
    ids: list[str] = []
    for number in range(13):
        (tmp_path / ("impl/a" if number < 12 else "notes")).write_text(str(number))
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", "c")
        ids.append(git(tmp_path, "rev-parse", "HEAD"))
    return ids


@pytest.mark.parametrize(("position", "newer"), [(0, 11), (1, None), (11, None), (12, None)])
def test_warning_if_the_newest_result_is_ten_commits_old(
    freshness: ModuleType, commits: list[str], tmp_path: Path, position: int, newer: int | None
) -> None:
    reported = freshness.warnings([point(commits[position])], tmp_path)
    expected = f"is {newer} commits of impl old, more than 10: run ci/bench --history {newer}"
    assert [expected in line for line in reported] == ([True] if newer else [])


def test_warning_if_results_are_missing_or_of_another_history(
    freshness: ModuleType, commits: list[str], tmp_path: Path
) -> None:
    assert freshness.warnings([], tmp_path) == ["no benchmark results are recorded: run ci/bench"]
    (reported,) = freshness.warnings([point("a" * 40)], tmp_path)
    assert "is of a commit that is not in this history" in reported


def test_asv_pages_are_renamed_and_edited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asv = pytest.importorskip("asv", reason="the extra `benchmarks` of pyproject.toml brings asv")
    monkeypatch.syspath_prepend(str(CI))
    dashboard = importlib.import_module("_dashboard")
    monkeypatch.setattr(dashboard, "_fetch", lambda cache: False)
    for file in ("index.html", *dashboard.REPLACEMENTS):
        (tmp_path / file).write_text((Path(asv.__file__).parent / "www" / file).read_text())
    dashboard.finish(tmp_path, tmp_path / "npm")
    assert not (tmp_path / "index.html").exists()
    page = (tmp_path / "asv.html").read_text()
    assert '<a href="index.html" class="navbar-link">Overview</a> of' in page
    assert "pretty_name" in (tmp_path / "graphdisplay.js").read_text()
