"""The files of a verdict: `report.json` and the files that are made from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.judge import catalogue
from conformance.judge.judgement import RED
from conformance.report.page import write_catalogue, write_page
from conformance.report.verdict import exit_code, reasons

_PASSED = ("passed", "known", "reference cannot run here")


def conclude(report: dict[str, Any], out: Path, say: Callable[..., None]) -> int:
    """Determine the verdict, write all files and return the exit code. `say` prints the verdict."""
    report["reasons"] = reasons(report)
    report["verdict"] = "red" if report["reasons"] else "green"
    (out / "report.json").write_text(json.dumps(report, indent=1))
    say(report=report)
    # These come last, so that an error in them does not suppress the verdict.
    (out / "relay.json").write_text(json.dumps(relay(report) | {"artifact": str(out.absolute())}))
    (out / "clauses.json").write_text(json.dumps(catalogue.as_dict(), indent=1))
    write_catalogue(catalogue.as_dict(), out / "clauses.html")
    write_page(report, out / "index.html")
    return exit_code(report)


def relay(report: dict[str, Any]) -> dict[str, int]:
    """Return the counts of a report for relays of continuous integration. Clauses without tests are skipped.

    A run that is red although no test failed counts one failure.
    """
    outcomes = [result["outcome"] for result in (*report["tests"], *report["not_run"])]
    passed = sum(outcome in _PASSED for outcome in outcomes)
    failed = sum(outcome in RED for outcome in outcomes)
    skipped = len(outcomes) - passed - failed
    return {"passed": passed, "failed": failed or int(report["verdict"] == "red"), "skipped": skipped}
