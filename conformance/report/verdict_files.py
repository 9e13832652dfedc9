"""What a verdict is carried in: the files beside `report.json`, which all follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance import catalogue
from conformance.report.badge import badge
from conformance.report.catalogue_page import write_catalogue
from conformance.report.ctrf import ctrf
from conformance.report.page import write_page
from conformance.report.verdict import exit_code, reasons


def conclude(report: dict[str, Any], out: Path, say: Callable[..., None]) -> int:
    """Come to the verdict, write it and say it; returns the exit code."""
    report["reasons"] = reasons(report)
    report["verdict"] = "red" if report["reasons"] else "green"
    (out / "report.json").write_text(json.dumps(report, indent=1))
    say(report=report)
    # Last, so that nothing in them can keep the verdict back.
    (out / "ctrf.json").write_text(json.dumps(ctrf(report), indent=1))
    (out / "badge.svg").write_text(badge(report))
    (out / "clauses.json").write_text(json.dumps(catalogue.as_dict(), indent=1))
    write_catalogue(catalogue.as_dict(), out / "clauses.html")
    write_page(report, out / "index.html")
    return exit_code(report)
