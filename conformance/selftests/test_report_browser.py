"""The page in a real browser, at a desk's and a phone's width: filters, links, keys, contrast, and what is printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra `report` of pyproject.toml brings what the report needs")

from conformance.report import write_page
from conformance.report.baseline import compare
from conformance.report.matrix import matrix
from conformance.report.page import write_catalogue
from conformance.selftests.browser import CONTRAST, Browser, start
from conformance.selftests.sample_reports import (
    CLAUSE,
    DEVIATION,
    a_report,
    judged,
    not_timed,
    timed,
    trained,
)

pytestmark = pytest.mark.deadline(60)
WIDTHS = {"desk": 1280, "phone": 390}
OTHER = CLAUSE | {"id": "nn.utils.clip_grad.y", "area": "nn.utils.clip_grad", "says": "It clips."}
LONG = "conformance/amp/test_" + "a_very_long_name_" * 8

SHOWN = "all('tr[data-clause]').filter((row) => row.checkVisibility()).map((row) => row.dataset.clause)"
COMBINATIONS = """
(() => {
  const fields = all("select[data-filter]");
  const found = [];
  const choose = (index) => {
    if (index < fields.length) {
      for (const option of fields[index].options) { fields[index].value = option.value; choose(index + 1); }
      fields[index].value = "";
      return;
    }
    apply();
    const shown = rows.filter((row) => row.checkVisibility()).map((row) => row.dataset.clause);
    found.push([fields.map((field) => field.value), shown, document.getElementById("shown").textContent]);
  };
  choose(0);
  return found;
})()
"""
FOCUS = "document.activeElement.outerHTML.slice(0, 120)"
OUTLINE = "getComputedStyle(document.activeElement).outlineStyle"


def a_red_report() -> dict[str, Any]:
    report = a_report(
        judged("failed", nodeid=f"{LONG}[float16]", dtype="float16", reason="got 1\nexpected 2 " + "x" * 200)
        | {"replay": f"python -m pytest '{LONG}[float16]'"},
        judged("failed", nodeid="second", dtype="float16", reason="got 3", replay="python -m pytest second"),
        judged("passed", nodeid="third", dtype="float32"),
        judged("known", nodeid="fourth", device="", deviation="a.row"),
        judged("passed", nodeid="fifth", clause=OTHER["id"], world_size="2"),
        judged("unavailable", nodeid="sixth", clause=OTHER["id"], device="cuda", reason="no device"),
        clauses=[CLAUSE, OTHER],
        deviations=[DEVIATION],
        speed={
            "rows": [
                timed("A", 0.5, 0.6) | {"elsewhere": {"lab": 0.4, "another-machine": 0.7}},
                timed("A", 0.9, 1.1),
                timed("B", 2, 3),
                not_timed("B", "it\nbroke"),
            ],
            "command": "python -m benchmarks",
        },
        training={"runs": [trained(False), trained(True)]},
    )
    earlier = a_report(judged("passed", nodeid="second"), judged("failed", nodeid="third"), subject="torch")
    earlier["speed"] = {"rows": [timed("B", 1, 1.5)]}
    return report | {"baseline": asdict(compare(earlier, report))}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    reports = {"red": a_red_report(), "green": a_report(judged("passed"))}
    for name, report in reports.items():
        write_page(report, folder / f"{name}.html")
    catalogue = {"catalogue": "262c9d0d1e03", "torch": ["2.13"], "clauses": [CLAUSE, OTHER]}
    write_catalogue(catalogue, folder / "clauses.html")
    return {name: folder / f"{name}.html" for name in (*reports, "clauses")}


def fill(browser: Browser, selector: str, value: str) -> None:
    browser.run(
        f"(field => {{ field.value = '{value}'; field.dispatchEvent(new Event('input', {{ bubbles: true }})); }})"
        f"(document.querySelector('{selector}'))"
    )


@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
@pytest.mark.parametrize("name", ["red", "green"])
def test_page_fits_viewport_and_loads_no_external_resource(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(pages[name], width)
    browser.run("all('details').forEach((each) => { each.open = true; })")
    assert browser.run("document.documentElement.scrollWidth") <= width
    texts = browser.run(CONTRAST)
    assert len(texts) > 50
    assert [text for text in texts if text["contrast"] < text["least"]] == []
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "about", "data"}
    assert browser.complaints == []


@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_filters_keep_what_they_name(browser: Browser, pages: dict[str, Path], width: int) -> None:
    browser.open(pages["red"], width)
    both = [CLAUSE["id"], OTHER["id"]]
    assert browser.run(SHOWN) == both
    for word, expected in (("clips", [OTHER["id"]]), ("nothing has this", [])):
        fill(browser, "[data-filter=word]", word)
        assert browser.run(SHOWN) == expected, word
        reported = browser.run("document.getElementById('shown').textContent")
        assert reported == f"{len(expected)} of 2 clauses" + (
            "" if expected else ": none has all that is asked for"
        )
    fill(browser, "[data-filter=word]", "")
    fill(browser, "[data-filter=dtype]", "float32")
    assert browser.run(SHOWN) == [CLAUSE["id"]]
    columns = "all('thead th').filter((th) => th.closest('.matrix') && th.checkVisibility()).map((th) => th.innerText)"
    assert browser.run(columns) == ["Clause", "cpu\nfloat32"]
    browser.run("document.querySelector('.filters [type=reset]').click()")
    browser.run("new Promise((done) => setTimeout(done, 20))")
    assert browser.run(SHOWN) == both


def test_filters_together_keep_what_one_cell_has(browser: Browser, pages: dict[str, Path]) -> None:
    """Every combination of what can be chosen, against the cells of the report itself."""
    browser.open(pages["red"], 1280)
    combinations = browser.run(COMBINATIONS)
    cells = [
        (row.clause["id"], (area.name, cell.outcome, axis.device, axis.dtype, axis.world_size))
        for area in matrix(a_red_report())
        for row in area.rows
        for axis, cell in row.cells.items()
    ]
    assert len(combinations) > 300
    for chosen, shown, reported in combinations:
        fits = {
            name
            for name, has in cells
            if all(
                not expected or expected == (value or "-")
                for expected, value in zip(chosen, has, strict=True)
            )
        }
        assert set(shown) == fits, chosen
        assert reported.startswith(f"{len(fits)} of 2 clauses")


@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_address_with_cell_opens_it(browser: Browser, pages: dict[str, Path], width: int) -> None:
    browser.complaints.clear()
    browser.open(pages["red"], width, fragment=f"#{CLAUSE['id']}/cpu-float16")
    assert browser.run("document.activeElement.textContent") == "cpu · float16"
    box = browser.run("document.activeElement.getBoundingClientRect().toJSON()")
    assert 0 <= box["top"] < 900
    browser.open(pages["red"], width, fragment="#no%such%place")
    assert browser.complaints == []


def test_back_leads_from_a_failure_to_its_cell(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["red"], 1280)
    browser.run("document.querySelector('a[data-outcome=failed]').scrollIntoView()")
    before = browser.run("scrollY")
    browser.run("document.querySelector('a[data-outcome=failed]').click()")
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert browser.run("scrollY") != before
    browser.run("history.back()")
    browser.run("new Promise((done) => setTimeout(done, 200))")
    assert browser.run("location.hash") == ""
    assert abs(browser.run("scrollY") - before) < 100


@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_search_word_filters_catalogue(browser: Browser, pages: dict[str, Path], width: int) -> None:
    browser.open(pages["clauses"], width)
    shown = "all('.clauses tbody tr').filter((row) => row.checkVisibility()).length"
    for word, rows in (("clips", 1), ("nothing has this", 0), ("IT DOES", 1), ("", 2)):
        fill(browser, "[data-search]", word)
        assert browser.run(shown) == rows, word
    assert browser.run("document.querySelector('.scroll').clientWidth") <= width


@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_cell_links_to_failure(browser: Browser, pages: dict[str, Path], width: int) -> None:
    browser.open(pages["red"], width)
    pre = f"all('pre', document.getElementById('tests-{CLAUSE['id']}'))[0]"
    assert not browser.run(
        f"{pre}.checkVisibility({{ contentVisibilityAuto: true }}) && {pre}.offsetHeight > 0"
    )
    browser.run("document.querySelector('a[data-outcome=failed]').click()")
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert browser.run(f"{pre}.innerText").startswith("got 1\nexpected 2")
    box = browser.run(f"{pre}.getBoundingClientRect().toJSON()")
    assert 0 <= box["top"] < 900
    assert browser.run("document.activeElement.textContent") == "cpu · float16"
    replay = "document.activeElement.nextElementSibling.querySelector('.command code').textContent"
    assert browser.run(replay) == f"python -m pytest '{LONG}[float16]'"


def test_link_to_filtered_entry_shows_it(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["red"], 1280)
    fill(browser, "[data-filter=area]", OTHER["area"])
    browser.run(f"location.hash = 'tests-{CLAUSE['id']}'")
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert browser.run(f"document.getElementById('tests-{CLAUSE['id']}').open")
    assert browser.run(SHOWN) == [CLAUSE["id"], OTHER["id"]]


def test_page_is_usable_by_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["red"], 1280)
    focused: list[str] = []
    for _ in range(80):
        browser.press("Tab", 9)
        focused.append(browser.run(FOCUS))
        assert browser.run(OUTLINE) != "none", focused[-1]
        if 'aria-label="Clauses of torch' in focused[-1]:
            break
    order = ["<summary", 'class="copy"', 'data-filter="word"', 'data-filter="outcome"', 'data-filter="world"']
    order.append('aria-label="Clauses of torch')
    places = [next(i for i, element in enumerate(focused) if part in element) for part in order]
    assert places == sorted(places), focused

    for key, code, text in (("Enter", 13, "\r"), (" ", 32, " ")):
        browser.run("document.querySelector('#red summary').focus()")
        before = browser.run("document.querySelector('#red details').open")
        browser.press(key, code, text)
        assert browser.run("document.querySelector('#red details').open") is not before
    browser.run("document.querySelector('a[data-outcome=failed]').focus()")
    browser.press("Enter", 13, "\r")
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert browser.run("document.activeElement.textContent") == "cpu · float16"


def test_command_is_copied(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["red"], 1280)
    browser.run("document.querySelector('#red .copy').focus()")
    browser.press("Enter", 13, "\r")
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert browser.run("document.querySelector('#red .copy').textContent") in ("copied", "press Ctrl-C")
    assert browser.run("getSelection().toString()") == f"python -m pytest '{LONG}[float16]'"


def test_printed_page_is_unfolded_and_without_controls(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["red"], 1280)
    visible = "all('{}').filter((each) => each.checkVisibility()).length"
    filters, folded = visible.format(".filters, nav, button"), visible.format("#baseline li, #red li")
    on_screen = browser.run(filters), browser.run(folded)
    browser.emulate_print()
    printed = browser.run(filters), browser.run(folded)
    assert on_screen[0] > 0
    assert printed[0] == 0
    assert printed[1] > on_screen[1]
    heights = browser.run("all('.scroll, pre').map((each) => getComputedStyle(each).maxHeight)")
    assert set(heights) == {"none"}
    browser.emulate_print(False)
