"""The page of a report: its contents, no external resources, and escaped texts of a subject."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="the extra `report` of pyproject.toml brings what the report needs")

from conformance.report import speed, write_page
from conformance.report.baseline import compare
from conformance.report.matrix import OUTCOMES, by_mark, matrix
from conformance.report.text import legible
from conformance.selftests.sample_reports import (
    CLAUSE,
    DEVIATION,
    HOSTILE,
    Page,
    a_report,
    judged,
    not_timed,
    timed,
    trained,
)


def draw(report: dict[str, Any], folder: Path) -> Page:
    write_page(report, folder / "index.html")
    return Page(folder / "index.html")


def a_full_report(text: str) -> dict[str, Any]:
    """Return a report with every part, and with `text` wherever a text may come from a subject."""
    run = trained(False)
    run |= {"name": text, "checks": [{"name": text, "passed": False, "says": text}], "reasons": [text]}
    report = a_report(
        judged("failed", nodeid=f"x[{text}]", reason=text, replay=text, dtype="float32"),
        judged("failed", nodeid=f"y[{text}]", reason=text, replay=text, world_size="2"),
        judged("crash", nodeid=f"z[{text}]", clause="", reason=text, replay=text),
        judged("known", deviation="a.row", reason=text),
        judged("unavailable", nodeid="u", reason=text),
        subject=text,
        clauses=[CLAUSE, CLAUSE | {"id": "amp.grad_scaler.y", "says": text, "covers": [text]}],
        deviations=[
            DEVIATION
            | {"torch_does": text, "we_do": text, "why": text, "thread": f"pytorch/pytorch#1, {text}"}
        ],
        ended_early=[f"{text}\n{text}"],
        speed={
            "rows": [
                timed(text, 0.4, 0.6) | {"elsewhere": {text: 0.5}},
                not_timed(f"{text}b", f"{text}\n{text}"),
            ],
            "command": text,
            "not_judged": text,
            "error": text,
        },
        training={"runs": [run], "lacking": [text], "error": text},
    )
    report["environment"] = report["environment"] | {"processor": text}
    earlier = a_report(judged("failed", nodeid=text, clause=text), subject=text, began=text)
    earlier["speed"] = {"rows": [timed(text, 0.1, 0.2)]}
    return report | {"baseline": asdict(compare(earlier, report))}


def test_page_shows_ratios_of_other_machines_and_why_speed_is_not_judged(tmp_path: Path) -> None:
    rows = [timed("A", 0.4, 0.6) | {"elsewhere": {"lab": 0.123}}, not_timed("B", "it broke")]
    page = draw(a_report(speed={"rows": rows, "not_judged": "this machine has no points"}), tmp_path)
    assert "Not judged: this machine has no points. The last column has ratios of other machines" in page.text
    assert "Elsewhere" in page.text
    assert "0.123" in page.text
    alone = draw(a_report(speed={"rows": [timed("A", 0.4, 0.6)], "against": "the points of lab"}), tmp_path)
    assert "Judged by the points of lab." in alone.text
    assert "Elsewhere" not in alone.text


def test_subject_output_is_escaped(tmp_path: Path) -> None:
    plain, page = draw(a_full_report("word"), tmp_path), draw(a_full_report(HOSTILE), tmp_path)
    # A text over two lines is folded, and a longer subject is cut elsewhere: for the rest both have the same elements.
    kinds, expected = Counter(tag for tag, _ in page.elements), Counter(tag for tag, _ in plain.elements)
    for tag in ("script", "style", "b", "a", "table", "tr", "svg", "details", "li", "pre", "code"):
        assert kinds[tag] == expected[tag], tag
    assert page.code == plain.code
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.text.count("alert(1)") > 40
    assert not [
        character
        for character in page.source
        if unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in "\n\t"
    ]
    assert "[31m" not in page.source


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode 語, a\ttab\nand a line", "plain, ünïcode 語, a\ttab\nand a line"),
        (
            "\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\nnext, alone \x1b",
            "red link\nnext, alone ␛",
        ),
        ("nul \0, bell \x07, delete \x7f", "nul ␀, bell ␇, delete ␡"),
        ("a\r\nb\rc", "a\nb␍c"),
        ("half \ud800 and turned \u202e", "half \ufffd and turned \ufffd"),
    ],
    ids=["plain", "colours", "control", "carriage", "halves"],
)
def test_text_is_made_legible(text: str, shown: str) -> None:
    assert legible({"key": [text, 1, None]}) == {"key": [shown, 1, None]}


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cf", "Cs"]), max_size=50))
def test_legible_text_is_unchanged(text: str) -> None:
    assert legible(text) == text


def test_long_text_is_shortened_in_middle(tmp_path: Path) -> None:
    flood = "begin " + "x" * 5_000_000 + " end"
    page = draw(a_report(judged("failed", nodeid="y", reason=flood, replay="r")), tmp_path)
    assert "begin xxx" in page.text
    assert "xxx end" in page.text
    assert "[4,980,010 characters are left out here]" in page.text
    assert len(page.source) < 200_000


def test_nothing_is_fetched(tmp_path: Path) -> None:
    page = draw(a_full_report("word"), tmp_path)
    assert not {"iframe", "img", "object", "embed", "base", "video", "audio"} & {
        tag for tag, _ in page.elements
    }
    for tag, attributes in page.elements:
        assert not attributes.keys() & {"src", "srcset", "action", "data", "poster", "formaction"}, tag
        addresses = [value for name, value in attributes.items() if name in ("href", "xlink:href")]
        local = [value for value in addresses if value.startswith(("#", "data:,"))]
        assert local == addresses or tag == "a", (tag, attributes)
        assert "url(" not in attributes.get("style", "").replace("url(#", "")
    assert not [word for word in ("url(", "@import", "http:", "https:") if word in page.code["style"]]
    assert not [
        word for word in ("fetch(", "XMLHttp", "import(", "http", "//cdn") if word in page.code["script"]
    ]


def test_every_link_has_its_target(tmp_path: Path) -> None:
    page = draw(a_full_report("word"), tmp_path)
    ids = [attributes["id"] for tag, attributes in page.elements if "id" in attributes]
    own = [name for name in ids if not name.startswith(("figure_", "patch_", "axes_", "line2d_", "text_"))]
    links = {attributes["href"] for tag, attributes in page.elements if tag == "a"}
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert "https://github.com/pytorch/pytorch/issues/1" in links
    named = [
        name for name in own if name.startswith(("tests-", "failure-", "amp.")) or name in ("red", "speed")
    ]
    assert len(named) == len(set(named)) >= 8


def test_report_page_is_below_one_megabyte(tmp_path: Path) -> None:
    clauses = [CLAUSE | {"id": f"amp.grad_scaler.c{n}"} for n in range(150)]
    dtypes = ("float16", "bfloat16", "float32", "float64")
    tests = [
        judged("passed", nodeid=f"conformance/amp/test_grad_scaler.py::test_{n}[cpu-{dtype}]", dtype=dtype)
        | {"clause": clauses[n % 150]["id"]}
        for n, dtype in itertools.product(range(400), dtypes)
    ]
    training = {"runs": [trained(True) for _ in range(4)]}
    report = a_report(*tests, clauses=clauses, training=training)
    draw(report, tmp_path)
    assert (tmp_path / "index.html").stat().st_size < 1_000_000


def test_many_broken_clauses_are_folded(tmp_path: Path) -> None:
    clauses = [CLAUSE | {"id": f"amp.grad_scaler.c{n}", "says": f"Says {n}."} for n in range(100)]
    tests = [
        judged(
            "failed", nodeid=f"test_{n}", clause=clause["id"], replay=f"replay {n}", reason=f"Because {n}."
        )
        for n, clause in enumerate(clauses)
    ]
    page = draw(a_report(*tests, clauses=clauses), tmp_path)
    broken = [attributes for tag, attributes in page.elements if attributes.get("class") == "broken"]
    assert len(broken) == 100
    assert sum("open" in attributes for attributes in broken) == 3
    for text in ("100 of 100 clauses broken", "Says 99.", "Because 99.", "replay 99"):
        assert text in page.text


def test_cell_shows_worst_outcome() -> None:
    report = a_report(
        judged("passed", nodeid="a", dtype="float16"),
        judged("failed", nodeid="b", dtype="float16"),
        judged("known", nodeid="c", world_size="2"),
        judged("passed", nodeid="d", clause="nn.x", dtype="int8"),
        clauses=[CLAUSE, {"id": "nn.x", "says": "", "covers": [], "area": "nn"}],
    )
    amp, nn = matrix(report)
    assert [axis.label for axis in amp.axes] == ["cpu · float16", "cpu · world\N{NO-BREAK SPACE}2"]
    assert [cell.outcome for cell in amp.rows[0].cells.values()] == ["failed", "known"]
    assert [len(cell.tests) for cell in amp.rows[0].cells.values()] == [2, 1]
    assert [axis.label for axis in nn.axes] == ["cpu · int8"]


def test_red_areas_come_first_and_missing_areas_last() -> None:
    outcomes = {"a": "not provided", "b": "", "c": "passed", "d": "failed"}
    report = a_report(
        *(judged(outcome, nodeid=name, clause=name) for name, outcome in outcomes.items() if outcome),
        clauses=[CLAUSE | {"id": name, "area": name} for name in outcomes],
    )
    assert [area.name for area in matrix(report)] == ["d", "c", "a", "b"]


def test_signs_of_outcomes_are_distinct() -> None:
    signs = [look.sign for look in OUTCOMES.values()]
    assert len(set(signs)) == len(signs)


def test_tests_of_one_function_that_agree_are_reported_together(tmp_path: Path) -> None:
    tests = [judged("passed", nodeid=f"a.py::test_x[{n}]") for n in "abc"]
    report = a_report(
        *tests,
        judged("failed", nodeid="a.py::test_x[d]", replay="r"),
        judged("passed", nodeid="a.py::test_y"),
    )
    cell = next(iter(matrix(report)[0].rows[0].cells.values()))
    assert [(calm.function, calm.parameters) for calm in cell.calm] == [
        ("a.py::test_x", ["[a]", "[b]", "[c]"]),
        ("a.py::test_y", []),
    ]
    assert [test["nodeid"] for test in cell.red] == ["a.py::test_x[d]"]
    page = draw(report, tmp_path)
    assert page.text.count("a.py::test_x") == page.text.count("a.py::test_x[d]") + 1


def test_overview_counts_clauses_by_area_and_outcome(tmp_path: Path) -> None:
    other = CLAUSE | {"id": "nn.x", "area": "nn"}
    page = draw(a_report(judged("failed"), clauses=[CLAUSE, other]), tmp_path)
    overview = page.source.partition('class="overview"')[2].partition("</table>")[0]
    text = re.sub(r"<[^>]+>|\s+", " ", overview).partition(">")[2].split()
    expected = (
        "Clauses by area and outcome Area ✗ failed accounted, not run torch.amp.grad_scaler 1 torch.nn 1"
    )
    assert text == expected.split()
    assert {'href="#area-amp.grad_scaler"', 'href="#area-nn"'} <= set(re.findall(r'href="[^"]+"', overview))
    assert {'id="area-amp.grad_scaler"', 'id="area-nn"'} <= set(re.findall(r'id="[^"]+"', page.source))


def test_clauses_are_counted_by_mark(tmp_path: Path) -> None:
    marks = {"a": "generic", "b": "generic", "c": "cuda"}
    clauses = [CLAUSE | {"id": f"nn.{name}", "area": "nn", "mark": mark} for name, mark in marks.items()]
    tests = [judged(outcome, clause=f"nn.{name}") for name, outcome in (("a", "passed"), ("b", "failed"))]
    report = a_report(*tests, clauses=clauses)
    assert [vars(counts) for counts in by_mark(matrix(report))] == [
        {"name": "cuda", "clauses": 1, "tested": 0, "hold": 0, "broken": 0},
        {"name": "generic", "clauses": 2, "tested": 2, "hold": 1, "broken": 1},
    ]
    table = draw(report, tmp_path).source.partition("Clauses by mark")[2].partition("</table>")[0]
    text = re.sub(r"<[^>]+>|\s+", " ", table.partition("<tbody>")[2]).split()
    assert text == ["cuda", "1", "0", "0", "0", "1", "generic", "2", "2", "1", "1", "0"]


def test_area_without_tests_is_one_line(tmp_path: Path) -> None:
    other = CLAUSE | {"id": "nn.x", "area": "nn"}
    row = DEVIATION | {"clause": "nn.x"}
    page = draw(a_report(judged("passed"), clauses=[CLAUSE, other], deviations=[row]), tmp_path)
    assert "1 accounted, not run" in page.text
    assert "tests-nn.x" not in page.source


@pytest.mark.parametrize(
    ("outcome", "reported"),
    [
        ("known", "does what torch does"),
        ("passed", "does what impl does"),
        ("failed", "does neither"),
        ("stale", "stale"),
    ],
)
def test_deviation_shows_side_of_subject(outcome: str, reported: str, tmp_path: Path) -> None:
    test = judged(outcome, deviation=DEVIATION["id"])
    assert reported in draw(a_report(test, deviations=[DEVIATION]), tmp_path).text
    unasked = draw(a_report(judged(outcome), deviations=[DEVIATION]), tmp_path).text
    assert "not tested" in unasked
    assert "1 deviation that this run did not test with impl" in unasked


@pytest.mark.parametrize(
    ("version", "side"), [("2.13.0+cpu", "does what impl does"), ("2.14.1+cpu", "does what torch does now")]
)
def test_fixed_deviation_names_torch_version(version: str, side: str, tmp_path: Path) -> None:
    row = DEVIATION | {"torch": "<2.14", "fixed_in": "2.14", "recorded": "2026-11-22"}
    report = a_report(judged("passed", deviation="a.row"), deviations=[row]) | {"torch": version}
    page = draw(report, tmp_path).text
    assert "fixed in torch 2.14; recorded on 2026-11-22" in page
    assert side in page


ratios = st.floats(1e-6, 1e6)


@given(ratio=ratios, other=ratios)
def test_ratio_scale_is_fixed_and_rises(ratio: float, other: float) -> None:
    assert 0 <= speed.position(ratio) <= 100
    assert speed.position(1.0) == 50
    if ratio < other:
        assert speed.position(ratio) <= speed.position(other)


@given(low=ratios, high=ratios)
def test_ratio_is_certain_only_if_complete_interval_is(low: float, high: float) -> None:
    low, high = sorted((low, high))
    row = timed("x", low, high)
    assert speed.is_slower(row) == (low > 1.03)
    assert speed.is_faster(row) == (high < 1 / 1.03)
    assert not (speed.is_slower(row) and speed.is_faster(row))


def test_cases_are_grouped_by_benchmark() -> None:
    rows = [timed("b", 2, 3), timed("a", 0.1, 0.2), not_timed("b", "it broke"), timed("a", 0.9, 1.1)]
    groups = speed.groups({"rows": rows})
    assert [(group.name, [case.mark for case in group.cases]) for group in groups] == [
        ("b", ["slower", "failed"]),
        ("a", ["faster", "even"]),
    ]
    assert [case.beyond for case in groups[1].cases] == ["left", ""]
