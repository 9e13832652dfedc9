"""The files of a verdict: `report.json` and the files that are made from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.judge import catalogue
from conformance.report.badge import badge
from conformance.report.catalogue_page import write_catalogue
from conformance.report.ctrf import ctrf, relay
from conformance.report.page import write_page
from conformance.report.verdict import exit_code, reasons


def conclude(report: dict[str, Any], out: Path, say: Callable[..., None]) -> int:
    """Determine the verdict, write all files and return the exit code. `say` prints the verdict."""
    report["reasons"] = reasons(report)
    report["verdict"] = "red" if report["reasons"] else "green"
    (out / "report.json").write_text(json.dumps(report, indent=1))
    say(report=report)
    # These come last, so that an error in them does not suppress the verdict.
    written = ctrf(report)
    (out / "ctrf.json").write_text(json.dumps(written, indent=1))
    (out / "relay.json").write_text(json.dumps(relay(written, out.absolute())))
    (out / "badge.svg").write_text(badge(report))
    (out / "clauses.json").write_text(json.dumps(catalogue.as_dict(), indent=1))
    write_catalogue(catalogue.as_dict(), out / "clauses.html")
    write_page(report, out / "index.html")
    return exit_code(report)
