"""The first page of summary.md: missing software, red tests by cause, and measurements beside predictions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from conformance.gpu import predictions
from conformance.gpu.markdown import first_line, named, table
from conformance.gpu.phases import LEFT_OUT

_COUNTED = ("kernels", "probe", "waits", "values", "graphs", "training")
_GOOD = ("agrees", "works", "ran")
_MOST_CAUSES = 20
_MOST_NAMED = 4
# Texts that differ between tests that fail for the same reason, and their replacements.
_VARYING = (
    (re.compile(r"0x[0-9a-f]+"), "0x…"),
    (re.compile(r"[-+]?\b\d[\d.,_]*(e[-+]?\d+)?\b"), "N"),
    (re.compile(r"'[^']*'|\"[^\"]*\""), "'…'"),
    (re.compile(r"\[[^\]]*\]"), "[…]"),
)


def first_page(report: dict[str, Any]) -> str:
    rows = {name: phase["rows"] for name, phase in report["phases"].items()}
    parts = ["\n".join(["## At a glance", "", *_missing(rows), *_counts(rows), *_not_run(report)])]
    if causes := causes_of(rows.get("judge", [])):
        parts.append(_red_tests(causes))
    if report["device"] == "cuda":
        parts.append(_predictions(rows))
    return "\n\n".join(parts)


def _missing(rows: dict[str, Any]) -> list[str]:
    warm = rows.get("warm-up", [])
    lacking = [
        f"- **{row['outcome']}: {row['name']}** {row['says']}" for row in warm if row["outcome"] != "there"
    ]
    library = [
        f"- C library: {row['says']}"
        for row in warm
        if row["name"] == "C library" and row["outcome"] == "there"
    ]
    return [*lacking, *library] if warm else ["- what this host lacks is unknown: the warm-up found nothing"]


def _counts(rows: dict[str, Any]) -> list[str]:
    lines = [_count(name, rows[name]) for name in _COUNTED if rows.get(name)]
    if judged := rows.get("judge"):
        counts = Counter(row["outcome"] for row in judged)
        lines.append(f"- judge: {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}")
    return lines


def _count(name: str, rows: Sequence[dict[str, Any]]) -> str:
    others: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] not in _GOOD:
            others.setdefault(row["outcome"], []).append(row["name"])
    good = len(rows) - sum(map(len, others.values()))
    listed = "".join(f"; **{outcome}**: {named(names, _MOST_NAMED)}" for outcome, names in others.items())
    return f"- {name}: {good} of {len(rows)} good{listed}"


def _not_run(report: dict[str, Any]) -> list[str]:
    return [
        f"- **not run: {len(phase['not_run'])} of {name}** ({first_line(phase['why'])}): "
        f"{named(phase['not_run'], _MOST_NAMED)}"
        for name, phase in report["phases"].items()
        if phase["not_run"] and phase["why"] != LEFT_OUT
    ]


def causes_of(judged: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Group the red tests by outcome and the constant text of their reason's first line. The largest group is first."""
    causes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in judged:
        if row.get("red"):
            causes.setdefault((row["outcome"], _cause(row.get("reason", ""))), []).append(row)
    return dict(sorted(causes.items(), key=lambda cause: -len(cause[1])))


def _cause(reason: str) -> str:
    line = first_line(reason.strip())
    for pattern, by in _VARYING:
        line = pattern.sub(by, line)
    return line


def _red_tests(causes: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    lines = [
        [str(len(tests)), outcome, first_line(tests[0].get("reason", "").strip()), tests[0].get("replay", "")]
        for (outcome, _), tests in list(causes.items())[:_MOST_CAUSES]
    ]
    more = len(causes) - _MOST_CAUSES
    text = "## Red tests by cause\n\n" + table(["tests", "outcome", "first reason", "first test"], lines)
    return text + (f"\n\nand {more} more causes in report.json" if more > 0 else "")


def _predictions(rows: dict[str, Any]) -> str:
    lines: list[list[str]] = []
    for prediction in predictions.load():
        measured = prediction.measured(rows.get(prediction.phase, []))
        shown = "not measured" if measured is None else f"{measured:.3g}"
        verdict = "" if measured is None else prediction.verdict(measured)
        expected = " to ".join(f"{bound:g}" for bound in dict.fromkeys(prediction.expected))
        expected += f" at {prediction.commit}" if prediction.commit else ""
        says = f"{prediction.row}: {prediction.says} {prediction.unit}".strip()
        lines.append([says, expected, prediction.goal, shown, verdict])
    return "## Expected and measured\n\n" + table(["", "expected", "goal", "measured", ""], lines)
