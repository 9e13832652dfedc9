"""Draws `report.json` as one HTML page that needs nothing beside it."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

from conformance.report.matrix import SEVERITY, SIGNS, matrix
from conformance.results import RED
from conformance.training.plot import draw


def write_page(report: dict[str, Any], file: Path) -> None:
    """Write the page for a report as `conformance.gate` assembles it; every text in it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    judged = [test for test in report["tests"] if test["clause"]]
    own = [test for test in report["tests"] if not test["clause"]]
    page = environment.get_template("page.html").render(
        report=report,
        areas=matrix(report),
        counts=Counter(test["outcome"] for test in judged),
        own_counts=Counter(test["outcome"] for test in own),
        red=[test for test in report["tests"] if test["outcome"] in RED],
        severity=SEVERITY,
        signs=SIGNS,
        deviation_outcomes=_deviation_outcomes(report),
        speed_plot=_speed_plot(report.get("speed") or {}),
        training_plots=[
            _as_svg(draw(run, report["subject"])) for run in (report.get("training") or {}).get("runs", [])
        ],
        style=Markup(Path(__file__).with_name("page.css").read_text()),
        script=Markup(Path(__file__).with_name("page.js").read_text()),
        dumps=json.dumps,
    )
    file.write_text(page)


def _deviation_outcomes(report: dict[str, Any]) -> dict[str, str]:
    """For each row, the worst outcome of the tests that assert it."""
    found: dict[str, str] = {}
    for test in report["tests"]:
        if test["deviation"]:
            both = (test["outcome"], found.get(test["deviation"], test["outcome"]))
            found[test["deviation"]] = min(both, key=SEVERITY.index)
    return found


def _speed_plot(speed: dict[str, Any]) -> Markup | None:
    """Subject ÷ torch for each case, with its 95% interval; left of 1 is faster than torch."""
    rows = [row for row in speed.get("rows", []) if row["outcome"] == "measured"]
    if not rows:
        return None
    figure = Figure(figsize=(9, 0.8 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for height, row in enumerate(reversed(rows)):
        low, high = row["low"], row["high"]
        colour = "#1a7f37" if high < 1 else "#b35900" if low > 1 else "#57606a"
        axes.plot([low, high], [height, height], color=colour, linewidth=2)
        axes.plot([row["ratio"]], [height], "o", color=colour, markersize=5)
    axes.axvline(1.0, color="#24292f", linewidth=1)
    axes.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)], fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:.2g}")
    axes.xaxis.set_minor_formatter("{x:.2g}")
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_xlabel("time of the subject ÷ time of torch (log scale; left of 1 is faster)", fontsize=9)
    axes.grid(axis="x", which="both", alpha=0.25)
    return _as_svg(figure)


def _as_svg(figure: Any) -> Markup:
    drawn = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "tandem", "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    # Matplotlib escapes the texts it draws; the XML prologue has no place inside HTML.
    return Markup(drawn.getvalue()[drawn.getvalue().index("<svg") :])
