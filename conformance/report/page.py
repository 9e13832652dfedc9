"""Draws `report.json` as one HTML page that needs nothing beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from conformance.judge.judgement import RED
from conformance.judge.results import Broken, broken_clauses
from conformance.judge.surface import is_torch_in
from conformance.report import simulation, speed
from conformance.report.kill_table import kill_matrix
from conformance.report.matrix import MEANINGS, SIGNS, Area, matrix, ranked
from conformance.report.text import legible
from conformance.report.verdict import parts

_HERE = Path(__file__).parent
_SIDES = {"known": "takes torch's side", "passed": "takes impl's side", "failed": "takes neither side"}


def write_page(report: dict[str, Any], file: Path) -> None:
    """Write the page for a report as `conformance.gate` assembles it; every text in it is made legible and escaped."""
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
            own_counts=ranked(test["outcome"] for test in report["tests"] if not test["clause"]),
            red=_red(report),
            failures={
                t["nodeid"]: f"failure-{n}" for n, t in enumerate(report["tests"]) if t["outcome"] in RED
            },
            clause_ids={row.clause["id"] for area in areas if area.axes for row in area.rows},
            sides=_sides(report),
            kills=kill_matrix(report),
            speed=speed.groups(report.get("speed") or {}),
            elsewhere=speed.elsewhere(report.get("speed") or {}),
            training_plots=_plots(report),
            simulation_picture=simulation.drawn(report),
        )
    )
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
        "signs": SIGNS | {"not run": "–"},
        "meanings": MEANINGS,
        "ticks": speed.TICKS,
        "dumps": json.dumps,
        "style": Markup((_HERE / "page.css").read_text()),
        "script": Markup((_HERE / "page.js").read_text()),
    }
    return environment


def _breakable(name: str) -> Markup:
    """A long name that may be broken after its dots, underscores, slashes and brackets; copied, it is whole."""
    return Markup(re.sub(r"([._/\[]|::)(?=\w)", r"\1<wbr>", str(escape(name))))


def _whole_flags(command: str) -> Markup:
    """A command whose options are not broken after their hyphens."""
    return Markup(re.sub(r"(?<= )(--?[\w-]+)", r'<span class="flag">\1</span>', str(escape(command))))


def _threads(text: str) -> Markup:
    """Public threads (`pytorch/pytorch#1`) as links."""
    link = r'<a href="https://github.com/\1/issues/\2" rel="noreferrer">\1#\2</a>'
    return Markup(re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", link, "" if text == "own" else str(escape(text))))


def _red(report: dict[str, Any]) -> list[tuple[Broken, list[dict[str, Any]]]]:
    """What is broken, in the words of this report's own clauses, each with its red tests."""
    says = {clause["id"]: clause["says"] for clause in report["clauses"]}
    found: dict[str, list[dict[str, Any]]] = {}
    for test in report["tests"]:
        if test["outcome"] in RED:
            found.setdefault(test["clause"] or test["nodeid"], []).append(test)
    return [
        (replace(broken, says=says.get(broken.name, broken.says)), found[broken.name])
        for broken in broken_clauses(report["tests"])
    ]


def _outcomes(areas: Sequence[Area]) -> list[str]:
    """Those that the tables and the tests behind them show, the worst first."""
    rows = [row for area in areas if area.axes for row in area.rows]
    tests = [test for row in rows for cell in row.cells.values() for test in cell.tests]
    found = ranked([row.outcome for row in rows] + [test["outcome"] for test in tests])
    return [outcome for outcome, _ in found]


def _sides(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """For each deviation the worst outcome of the tests that assert it, and what that says of the subject."""
    seen: dict[str, list[str]] = {}
    for test in report["tests"]:
        seen.setdefault(test["deviation"], []).append(test["outcome"])
    worst = {row: ranked(outcomes)[0][0] for row, outcomes in seen.items()}
    return {
        row["id"]: (worst[row["id"]], _side(row, worst[row["id"]], report["torch"]))
        if row["id"] in worst
        else ("not run", "not asked")
        for row in report["deviations"]
    }


def _side(row: dict[str, Any], outcome: str, torch: str) -> str:
    if outcome == "passed" and not is_torch_in(row.get("torch", ""), torch):
        return "does as torch does now"
    return _SIDES.get(outcome, outcome)


def _plots(report: dict[str, Any]) -> list[Markup]:
    runs = (report.get("training") or {}).get("runs", [])
    if not runs:
        return []
    from conformance.report.plots import plot  # noqa: PLC0415 (brings matplotlib, which a judge alone does without)

    return [plot(run, report["subject"]) for run in runs]
