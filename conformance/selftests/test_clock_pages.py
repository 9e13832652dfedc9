"""What the clock tells people: the dashboard's first page, asv's pages in our words, the warning about old points."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("jinja2", reason="the extra `conformance` of pyproject.toml brings what draws the page")

from benchmarks import asv_format, catalogue, history, landing

pytestmark = pytest.mark.deadline(60)
CI = Path(__file__).resolve().parents[2] / "ci"
TRAITS = {"cpu": "AMD EPYC", "num_cpu": "2", "ram": "24 GiB", "gpu": "none", "driver": "none"}
TRAITS |= {"torch": "2.13.0", "python": "3.11"}
TOLD = {
    f"Clip[{size}]": landing.Told("clip_grad_norm_", "bench_clip.Clip.track_ratio_vs_torch", {"shapes": size})
    for size in ("few", "many")
}


def point(commit: str, day: int, machine: str = "amd", **ratios: float) -> history.Point:
    values = {f"Clip[{size}]": history.Ratio(ratio, 0.05) for size, ratio in ratios.items()}
    return history.Point(Path(), machine, commit * 40, day * 86_400_000, TRAITS, values)


def test_the_first_page_tells_the_newest_point_and_its_machine() -> None:
    page = landing.page(landing.machines([point("a", 1, few=0.5), point("b", 2, few=0.5)], TOLD))
    assert "bbbbbbbb of 1970-01-03 00:00 UTC; 2 points" in page
    assert "AMD EPYC, 2 cores, 24 GiB, no GPU" in page
    assert "torch 2.13.0, Python 3.11" in page
    assert "0.50 × torch" in page


@pytest.mark.parametrize(
    ("earlier", "now", "mark"),
    [
        ((), 0.5, "faster"),
        ((), 1.0, "even"),
        ((), 1.2, "slower"),
        ((0.5,), 0.59, "faster"),
        ((0.5,), 0.61, "worse"),
        ((0.5, 0.5, 0.1), 0.55, "faster"),
        ((1.5,), 1.5, "slower"),
    ],
)
def test_a_case_is_marked_by_what_it_was_and_by_torch(
    earlier: tuple[float, ...], now: float, mark: str
) -> None:
    points = [point("a", day, few=ratio) for day, ratio in enumerate((*earlier, now))]
    (machine,) = landing.machines(points, TOLD)
    (case,) = machine.cases
    assert case.mark == mark
    assert (case in machine.first) == (mark in ("worse", "slower"))


def test_what_has_become_worse_comes_before_what_is_slower_and_machines_by_their_newest_point() -> None:
    points = [
        point("a", 1, few=0.5, many=1.5),
        point("b", 2, few=0.9, many=1.5),
        point("c", 3, "intel", few=0.5),
    ]
    intel, amd = landing.machines(points, TOLD)
    assert (intel.name, amd.name) == ("intel", "amd")
    assert [case.told.case for case in amd.first] == ["few", "many"]
    assert amd.cases[0].change == "+80%"
    page = landing.page([intel, amd])
    assert (
        page.index("Nothing is slower")
        < page.index(">worse than before<")
        < page.index(">slower than torch<")
    )


def test_a_case_links_to_its_curve() -> None:
    assert TOLD["Clip[few]"].link("amd-epyc") == (
        "asv.html#bench_clip.Clip.track_ratio_vs_torch?machine=amd-epyc&p-shapes=%27few%27"
    )


def test_without_points_the_page_says_how_to_make_one() -> None:
    assert "ci/bench" in landing.page(landing.machines([], TOLD))


def test_each_headline_has_a_curve_that_asv_knows() -> None:
    told = landing.headlines()
    assert {"RatioUpdate[cpu]", "RatioImport[cpu]"} <= told.keys()
    known = asv_format.described(catalogue.load_all())
    assert all(one.benchmark in known for one in told.values())
    assert told["FsdpPeak[4]"].link("m") == (
        "asv.html#bench_fsdp.FsdpPeak.track_bytes?machine=m&p-subject=%27impl%27&p-world_size=4"
    )


@pytest.fixture
def freshness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("_freshness")


@pytest.fixture
def commits(tmp_path: Path) -> list[str]:
    """Thirteen commits of a repository at `tmp_path`, oldest first; all but the last touch impl."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "impl").mkdir()
    git("init", "-q", "-b", "main")
    found: list[str] = []
    for number in range(13):
        (tmp_path / ("impl/a" if number < 12 else "notes")).write_text(str(number))
        git("add", ".")
        git("commit", "-qm", "c")
        found.append(git("rev-parse", "HEAD"))
    return found


@pytest.mark.parametrize(("position", "behind"), [(0, 11), (1, None), (11, None), (12, None)])
def test_a_newest_point_older_than_ten_commits_of_impl_is_warned_of(
    freshness: ModuleType, commits: list[str], tmp_path: Path, position: int, behind: int | None
) -> None:
    newest = history.Point(Path(), "amd", commits[position], 2, TRAITS, {})
    told = freshness.warnings([newest], tmp_path)
    wanted = f"is {behind} commits of impl old, more than 10: run ci/bench --history {behind}"
    assert [wanted in line for line in told] == ([True] if behind else [])


def test_points_of_another_history_and_none_at_all_are_warned_of(
    freshness: ModuleType, commits: list[str], tmp_path: Path
) -> None:
    assert freshness.warnings([], tmp_path) == ["the clock has no points: ci/bench makes one"]
    (told,) = freshness.warnings([point("a", 1)], tmp_path)
    assert "of no commit of this history" in told


def test_asv_pages_get_our_words_and_leave_the_first_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asv = pytest.importorskip("asv", reason="the extra `benchmarks` of pyproject.toml brings asv")
    monkeypatch.syspath_prepend(str(CI))
    dashboard = importlib.import_module("_dashboard")
    monkeypatch.setattr(dashboard, "_fetch", lambda cache: False)
    for file in ("index.html", *dashboard.WORDS):
        (tmp_path / file).write_text((Path(asv.__file__).parent / "www" / file).read_text())
    dashboard.finish(tmp_path, tmp_path / "npm")
    assert not (tmp_path / "index.html").exists()
    page = (tmp_path / "asv.html").read_text()
    assert '<a href="index.html" class="navbar-link">the clock</a> of' in page
    assert "pretty_name" in (tmp_path / "graphdisplay.js").read_text()
