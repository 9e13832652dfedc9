"""The pages of a report and of the catalogue, each one self-contained HTML file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from conformance.judge.judgement import RED
from conformance.judge.results import broken_clauses
from conformance.judge.surface import is_torch_in
from conformance.report import speed
from conformance.report.matrix import OUTCOMES, Area, by_mark, matrix, ranked
from conformance.report.text import legible
from conformance.report.verdict import parts

_HERE = Path(__file__).parent
_SIDES = {"known": "does what torch does", "passed": "does what impl does", "failed": "does neither"}


def write_page(report: dict[str, Any], file: Path) -> None:
    """Write the page of a report of `conformance.cli.gate`. All texts are made legible and escaped."""
    report = legible(report)
    areas = matrix(report)
    page = (
        environment()
        .get_template("page.html")
        .render(
            report=report,
            parts=parts(report),
            areas=areas,
            counts=ranked(test["outcome"] for test in report["tests"] if test["clause"]),
            outcomes=_outcomes(areas),
            clause_outcomes=[
                outcome
                for outcome, _ in ranked(row.outcome for area in areas for row in area.rows if row.cells)
            ],
            marks=by_mark(areas),
            own_counts=ranked(test["outcome"] for test in report["tests"] if not test["clause"]),
            red=broken_clauses(report["tests"], report["clauses"]),
            failures={
                t["nodeid"]: f"failure-{n}" for n, t in enumerate(report["tests"]) if t["outcome"] in RED
            },
            clause_ids={row.clause["id"] for area in areas if area.axes for row in area.rows},
            sides=_sides(report),
            speed=speed.groups(report.get("speed") or {}),
            elsewhere=speed.elsewhere(report.get("speed") or {}),
            training_plots=_plots(report),
        )
    )
    file.write_text(page, encoding="utf-8")


def write_catalogue(catalogue: dict[str, Any], file: Path) -> None:
    """Write the page of all clauses. `catalogue` is that of `conformance.judge.catalogue.as_dict`."""
    areas = [(area, list(rows)) for area, rows in groupby(catalogue["clauses"], lambda row: row["area"])]
    page = environment().get_template("catalogue.html").render(catalogue=catalogue, areas=areas)
    file.write_text(page, encoding="utf-8")


def environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": _breakable,
        "whole_flags": _whole_flags,
        "threads": _threads,
        "position": speed.position,
        "ratio": speed.in_digits,
        "time_of": speed.time_of,
        "when": lambda moment: moment[:16].replace("T", " ") + " UTC",
    }
    environment.globals |= {
        "looks": OUTCOMES,
        "ticks": speed.TICKS,
        "dumps": json.dumps,
        "style": Markup((_HERE / "page.css").read_text()),
        "script": Markup((_HERE / "page.js").read_text()),
    }
    return environment


def _breakable(name: str) -> Markup:
    """Allow line breaks in a name after dots, underscores, slashes and brackets. They do not appear in copied text."""
    return Markup(re.sub(r"([._/\[]|::)(?=\w)", r"\1<wbr>", str(escape(name))))


def _whole_flags(command: str) -> Markup:
    """Prevent line breaks after the hyphens of a command's options."""
    return Markup(re.sub(r"(?<= )(--?[\w-]+)", r'<span class="flag">\1</span>', str(escape(command))))


def _threads(text: str) -> Markup:
    """Make links of public threads, such as `pytorch/pytorch#1`."""
    link = r'<a href="https://github.com/\1/issues/\2" rel="noreferrer">\1#\2</a>'
    return Markup(re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", link, "" if text == "own" else str(escape(text))))


def _outcomes(areas: Sequence[Area]) -> list[str]:
    """Return the outcomes of all clauses and tests in the tables, the worst first."""
    rows = [row for area in areas if area.axes for row in area.rows]
    tests = [test for row in rows for cell in row.cells.values() for test in cell.tests]
    counts = ranked([row.outcome for row in rows] + [test["outcome"] for test in tests])
    return [outcome for outcome, _ in counts]


def _sides(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the worst outcome of each deviation's tests, and what it means for the subject."""
    by_deviation: dict[str, list[str]] = {}
    for test in report["tests"]:
        by_deviation.setdefault(test["deviation"], []).append(test["outcome"])
    worst = {row: ranked(outcomes)[0][0] for row, outcomes in by_deviation.items()}
    return {
        row["id"]: (worst[row["id"]], _side(row, worst[row["id"]], report["torch"]))
        if row["id"] in worst
        else ("not run", "not tested")
        for row in report["deviations"]
    }


def _side(row: dict[str, Any], outcome: str, torch: str) -> str:
    if outcome == "passed" and not is_torch_in(row.get("torch", ""), torch):
        return "does what torch does now"
    return _SIDES.get(outcome, outcome)


def _plots(report: dict[str, Any]) -> list[Markup]:
    runs = (report.get("training") or {}).get("runs", [])
    if not runs:
        return []
    from conformance.report.plots import plot  # noqa: PLC0415 (matplotlib is only needed for training)

    return [plot(run, report["subject"]) for run in runs]
