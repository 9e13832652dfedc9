"""Tests of the texts and the order of cases on the dashboard's first page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the extra `conformance` of pyproject.toml brings what draws the page")

from benchmarks import asv_format, catalogue, figures, history, landing, movers

pytestmark = pytest.mark.deadline(60)
TRAITS = {"cpu": "AMD EPYC", "num_cpu": "2", "ram": "24 GiB", "gpu": "none", "driver": "none"}
TRAITS |= {"torch": "2.13.0", "python": "3.11"}
LABELS = {
    f"Clip[{size}]": landing.Label(
        "clip_grad_norm_", "bench_clip.Clip.track_ratio_vs_torch", {"shapes": size}
    )
    for size in ("few", "many")
}


def point(commit: str, day: int, machine: str = "amd", **ratios: float) -> history.Point:
    values = {f"Clip[{size}]": history.RatioPoint(ratio, 0.05) for size, ratio in ratios.items()}
    return history.Point(Path(), machine, commit * 40, day * 86_400_000, TRAITS, values)


def test_page_shows_the_newest_result_and_its_machine() -> None:
    page = landing.page(landing.machines([point("a", 1, few=0.5), point("b", 2, few=0.5)], LABELS))
    assert "bbbbbbbb of 1970-01-03 00:00 UTC; 2 results in total" in page
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
def test_case_is_marked_by_its_earlier_ratio_and_by_torch(
    earlier: tuple[float, ...], now: float, mark: str
) -> None:
    points = [point("a", day, few=ratio) for day, ratio in enumerate((*earlier, now))]
    (machine,) = landing.machines(points, LABELS)
    (case,) = machine.cases
    assert case.mark == mark
    assert (case in machine.first) == (mark in ("worse", "slower"))


def test_worse_cases_come_before_slower_ones_and_newest_machine_first() -> None:
    points = [
        point("a", 1, few=0.5, many=1.5),
        point("b", 2, few=0.9, many=1.5),
        point("c", 3, "intel", few=0.5),
    ]
    intel, amd = landing.machines(points, LABELS)
    assert (intel.name, amd.name) == ("intel", "amd")
    assert [case.label.case for case in amd.first] == ["few", "many"]
    assert amd.cases[0].change == "+80%"
    page = landing.page([intel, amd])
    assert (
        page.index("No case is slower")
        < page.index(">worse than before<")
        < page.index(">slower than torch<")
    )


def test_page_shows_figures_and_movers() -> None:
    case = "RatioUnscale[gpt2, float32, kept, cpu]"
    ratio = history.RatioPoint(0.5, 0.0, 0.8, of_impl=0.05, of_torch=0.1)
    points = [
        history.Point(Path(), "amd", commit * 40, day, TRAITS, {case: replace(ratio, value=value)})
        for day, (commit, value) in enumerate((("a", 0.5), ("b", 0.6)), 1)
    ]
    moved = movers.movers(points, None, lambda *commits: True)
    page = landing.page([], None, figures.figures(points), moved)
    for cell in ("0.60 × torch, 50 ms", "40 ms", "80%", "amd at bbbbbbbb", "+10 ms", "0.50 → 0.60", "code"):
        assert f">{cell}</td>" in page
    assert f"<code>python -m benchmarks --case &#34;{case}&#34;</code>" in page
    assert "Figures to quote" not in landing.page([])


def test_figures_to_quote_are_measured_with_the_history() -> None:
    assert {headline.case for headline in figures.QUOTED} <= landing.headlines().keys()


def test_case_links_to_its_curve() -> None:
    assert LABELS["Clip[few]"].link("amd-epyc") == (
        "asv.html#bench_clip.Clip.track_ratio_vs_torch?machine=amd-epyc&p-shapes=%27few%27"
    )


def test_page_without_results_names_the_command_to_record_some() -> None:
    assert "ci/bench" in landing.page(landing.machines([], LABELS))


def test_each_headline_has_a_curve_that_asv_knows() -> None:
    label = landing.headlines()
    assert {"RatioUpdate[cpu]", "RatioImport[cpu]"} <= label.keys()
    known = asv_format.describe_benchmarks(catalogue.load_all())
    assert all(entry.benchmark in known for entry in label.values())
    assert label["FsdpPeak[4]"].link("m") == (
        "asv.html#bench_fsdp.FsdpPeak.track_bytes?machine=m&p-subject=%27impl%27&p-world_size=4"
    )
