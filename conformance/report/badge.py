"""Badge for a README: the verdict as a small picture."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from conformance.judge.judgement import RED
from conformance.report.text import legible
from conformance.report.verdict import worst_by_clause

_COLOURS = {"green": "#116329", "red": "#b3131f"}
_LETTER, _MARGIN = 6.6, 10  # widths in pixels


def badge(report: dict[str, Any]) -> str:
    """Return the badge of a report as a self-contained SVG."""
    left = legible(f"torch {report['torch'].partition('+')[0]}")
    right = legible(_says(report))
    colour = _COLOURS[report["verdict"]]
    split, width = _width(left), _width(left) + _width(right)
    title = escape(f"{legible(report['subject'])} {left}: {right}", {'"': "&quot;"})
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{title}">
<title>{title}</title>
<clipPath id="r"><rect width="{width}" height="20" rx="3"/></clipPath>
<g clip-path="url(#r)"><rect width="{split}" height="20" fill="#444c56"/>
<rect x="{split}" width="{width - split}" height="20" fill="{colour}"/></g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{split / 2}" y="14">{escape(left)}</text><text x="{(split + width) / 2}" y="14">{escape(right)}</text></g>
</svg>
"""


def _says(report: dict[str, Any]) -> str:
    outcomes = list(worst_by_clause(report).values())
    broken = sum(outcome in RED for outcome in outcomes)
    held = outcomes.count("passed") + outcomes.count("known")
    if report["bad_input"]:
        return "invalid input"
    if broken:
        return f"{broken} {'clause' if broken == 1 else 'clauses'} broken"
    return f"{report['verdict']}, {held} {'clause holds' if held == 1 else 'clauses hold'}"


def _width(text: str) -> int:
    return round(len(text) * _LETTER) + _MARGIN
