"""Tests of the curves on the dashboard's first page: means over commits, the SVG, and the page in a browser."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the extra `conformance` of pyproject.toml brings what draws the page")

from benchmarks import catalogue, curves, drawing, history, landing
from conformance.selftests.browser import CONTRAST, Browser, start

pytestmark = pytest.mark.deadline(60)
TRAITS = {"cpu": "AMD EPYC", "num_cpu": "2", "ram": "24 GiB", "gpu": "none", "driver": "none"}
TRAITS |= {"torch": "2.13.0", "python": "3.11"}


def point(number: int, noise: float = 0.05, **ratios: float) -> history.Point:
    """Return a point of commit `number`, two commits a day."""
    entries = {case: history.RatioPoint(ratio, noise) for case, ratio in ratios.items()}
    return history.Point(Path(), "lab", f"{number:x}" * 40, number * 43_200_000, TRAITS, entries)


def values(points: list[history.Point], *cases: str) -> list[float]:
    return [round(spot.value, 6) for spot in curves.spots(points, cases)]


def test_curve_is_the_geometric_mean() -> None:
    assert values([point(1, a=0.5, b=2.0), point(2, a=0.5, b=0.5)], "a", "b") == [1.0, 0.5]


def test_curve_ignores_added_and_removed_cases() -> None:
    points = [point(1, a=0.5, b=0.5), point(2, a=0.5), point(3, a=0.5, b=0.5), point(4, b=0.5, a=0.5, c=8.0)]
    assert values(points[:3], "a", "b") == [0.5, 0.5, 0.5]
    assert len(set(values(points, "a", "b", "c")[2:])) == 1
    assert values([point(1, a=1.0, b=4.0), point(2, a=1.0), point(3, a=1.0, b=0.25)], "a", "b")[1] == 0.5


def test_curve_leaves_out_points_without_most_cases() -> None:
    points = [point(1, a=0.5), point(2, a=0.5, b=0.5, c=0.5), point(3, other=0.1)]
    assert [spot.point for spot in curves.spots(points, ["a", "b", "c"])] == [points[1]]
    assert curves.spots(points, ["never"]) == []


def test_interval_narrows_with_more_cases_and_vanishes_without_noise() -> None:
    single, double = (curves.spots([point(1, a=1.0, b=1.0)], cases)[0] for cases in ("a", "ab"))
    assert math.log(single.high) == pytest.approx(math.sqrt(2) * math.log(double.high))
    assert single.low < 1.0 < single.high == pytest.approx(1 / single.low)
    (exact,) = curves.spots([point(1, 0.0, a=0.7)], "a")
    assert exact.low == pytest.approx(0.7) == exact.high
    (unknown,) = curves.spots([point(1, math.nan, a=0.7)], "a")
    assert unknown.low == pytest.approx(0.7)


def test_since_is_the_first_point_above_a_ratio() -> None:
    points = [point(1, a=1.2), point(2, a=0.9), point(3, a=1.1), point(4, b=9.0), point(5, a=1.3), point(6)]
    assert curves.since(points, "a", 1.0) is points[2]
    assert curves.since(points, "a", 0.5) is points[0]
    assert curves.since(points, "a", 1.5) is None
    assert curves.since(points, "b", 1.0) is points[3]


# The page


def label(area: str, curve: str, size: str) -> landing.Label:
    return landing.Label(
        area.lower(), "bench_x.RatioX.track_ratio_vs_torch", {"size": size}, area=area, curve=curve
    )


LABELS = {f"ranks{n}": label("FSDP step", f"{n} ranks", f"{n}") for n in (1, 2, 4)}
LABELS |= {name: label("Clipping", "", name) for name in ("few", "many")}
POINTS = [
    point(n, ranks1=1.0, ranks2=0.9 - 0.01 * n, ranks4=0.8, few=0.5, many=0.8 if n < 9 else 1.2)
    for n in range(1, 14)
]
SUBJECTS = {entry.commit: f"Change <{entry.date_ms}> & more" for entry in POINTS}


@pytest.fixture(scope="module")
def page() -> str:
    return landing.page(landing.machines(POINTS, LABELS), SUBJECTS)


def drawings(page: str) -> list[str]:
    return re.findall(r'<svg class="picture".*?</svg>', page, re.DOTALL)


def test_area_has_a_line_and_a_band_for_each_curve(page: str) -> None:
    broad, narrow, clipping = drawings(page)
    for picture, lines in ((broad, 3), (narrow, 3), (clipping, 1)):
        paths = re.findall(r'<polyline class="line[^"]*" points="([^"]*)"', picture)
        assert [len(path.split()) for path in paths] == [13] * lines
        assert picture.count('<polygon class="band') == lines
    assert re.findall(r'class="end [^>]*>([^<]*)<', narrow) == [
        "1.00 1 ranks",
        "0.80 4 ranks",
        "0.77 2 ranks",
    ]


def test_picture_has_a_summary_and_dates(page: str) -> None:
    assert "FSDP step: 1.00 (1 ranks), 0.77 (2 ranks), 0.80 (4 ranks) × torch&#39;s time" in page
    assert "Clipping: 0.77 × torch&#39;s time" in page
    assert "up by 22% since 1 Jan; 1 of 2 cases slower than torch" in page
    assert re.findall(r'text-anchor="(?:start|end)">(\d+ \w+)<', drawings(page)[0])[0] == "1 Jan"


def test_tooltip_has_the_commit_its_message_and_each_curve(page: str) -> None:
    titles = re.findall(r"<title>([^<]*)</title></rect>", drawings(page)[0])
    assert len(titles) == 13
    assert titles[-1].startswith(
        "dddddddd, 7 Jan 1970 12:00 UTC\nChange &lt;561600000&gt; &amp; more\n1 ranks 1.00 ("
    )


def test_slower_case_is_listed_with_its_first_slower_commit(page: str) -> None:
    table = re.sub(r"<svg.*?</svg>", "", page[page.index("Slower than torch, or") :], flags=re.DOTALL)
    text = " ".join(re.sub(r"<[^>]+>", " ", table).split())
    assert "many 1.200 ±5% 1.200 +0% slower than torch since 99999999 of 5 Jan: Change" in text


def test_memory_bound_case_shows_the_share_of_a_copy() -> None:
    ratios = {"few": history.RatioPoint(0.5, 0.05, share_of_copy=0.873)}
    page = landing.page(landing.machines([replace(POINTS[0], ratios=ratios)], LABELS))
    assert '<td class="number quiet copy">87%</td>' in page


def test_case_has_a_sparkline_in_its_row(page: str) -> None:
    sparks = re.findall(r'<svg class="spark".*?</svg>', page, re.DOTALL)
    assert len(sparks) == 1 + len(LABELS)  # all cases, and the slower one twice
    assert "13 results, from 0.800 to 1.200, lowest 0.800, highest 1.200" in sparks[0]


@pytest.mark.parametrize("ratios", [[1.0], [0.5, 0.5], [0.01, 30.0], [1e-4, 2e-4]])
def test_drawing_stays_inside_its_view_box(ratios: list[float]) -> None:
    spots = [curves.Spot(point(n + 1), ratio, ratio / 2, ratio * 2) for n, ratio in enumerate(ratios)]
    for svg in (drawing.picture([curves.Curve("x", spots)], "x", {}), drawing.sparkline(ratios, "x")):
        width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
        for path in re.findall(r'points="([^"]*)"', svg):
            for x, y in (map(float, spot.split(",")) for spot in path.split()):
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_areas_of_the_page_are_those_of_the_benchmarks() -> None:
    areas = {kind.area for kind in catalogue.load_all() if catalogue.is_tracked(kind)}
    assert areas == set(landing.AREAS)
    assert len(set(landing.AREAS)) == len(landing.AREAS)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
def test_page_fits_viewport_and_loads_no_external_resource(
    browser: Browser, page: str, tmp_path: Path, width: int, dark: bool
) -> None:
    file = tmp_path / "index.html"
    file.write_text(page)
    browser.complaints.clear()
    browser.requests.clear()
    browser.emulate_dark(dark)
    browser.open(file, width)
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.run("document.documentElement.scrollWidth") <= width
    texts = browser.run(CONTRAST)
    assert len(texts) > 50
    assert [text for text in texts if text["contrast"] < text["least"]] == []
    # The smallest text keeps its designed size and does not shrink with its picture.
    smallest = (
        "Math.min(...[...document.querySelectorAll('svg text')].filter((text) => text.checkVisibility())"
    )
    assert browser.run(f"{smallest}.map((text) => text.getBoundingClientRect().height))") >= 11
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "about", "data"}
    assert browser.complaints == []
