"""The report in the Common Test Report Format (ctrf.io), which dashboards of continuous integration read."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path
from typing import Any

from conformance.judge.judgement import FLAKY, RED

_STATUS = {
    **dict.fromkeys(RED, "failed"),
    **dict.fromkeys(("passed", "known", "reference cannot run here"), "passed"),
}


def ctrf(report: dict[str, Any]) -> dict[str, Any]:
    began_ms = round(1000 * datetime.datetime.fromisoformat(report["began"]).timestamp())
    tests = [_test(test) for test in report["tests"]]
    tests += [_not_run(result) for result in report["not_run"]]
    if report["verdict"] == "red" and not any(test["status"] == "failed" for test in tests):
        tests.append(_red_without_failure(report))
    counts = Counter(test["status"] for test in tests)
    kinds = ("passed", "failed", "skipped", "pending", "other")
    return {
        "reportFormat": "CTRF",
        "specVersion": "0.0.0",
        "generatedBy": "tandem-judge",
        "results": {
            "tool": {"name": "tandem-judge", "version": report["suite"]["version"] or "unknown"},
            "summary": {
                "tests": len(tests),
                **{kind: counts[kind] for kind in kinds},
                "start": began_ms,
                "stop": began_ms + round(1000 * report["seconds"]),
            },
            "tests": tests,
            "environment": {
                "appName": report["subject"],
                "appVersion": report["subject_version"],
                "commit": report["subject_commit"],
                "testEnvironment": f"torch {report['torch']}, {', '.join(report['devices'])}",
                "osPlatform": report["environment"]["system"],
            },
            "extra": {"verdict": report["verdict"], "seed": report["seed"], "profile": report["profile"]},
        },
    }


def _test(test: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a test. Outcomes that are neither passed nor failed are reported as skipped."""
    entry = {
        "name": test["nodeid"],
        "status": _STATUS.get(test["outcome"], "skipped"),
        "duration": round(1000 * test["seconds"]),
        "rawStatus": test["outcome"],
        "filePath": test["nodeid"].partition("::")[0],
        "tags": [word for word in (test["clause"], test["device"], test["dtype"]) if word],
    }
    if test["reason"]:
        entry |= {"message": test["reason"].splitlines()[0], "trace": test["reason"]}
    entry |= {"flaky": True} if test["outcome"] == FLAKY else {}
    return entry | ({"extra": {"replay": test["replay"]}} if test["replay"] else {})


def _not_run(result: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a clause without tests."""
    entry = {"name": result["clause"], "status": "skipped", "duration": 0, "rawStatus": result["outcome"]}
    return entry | {"tags": [result["clause"]], "message": result["reason"]}


def _red_without_failure(report: dict[str, Any]) -> dict[str, Any]:
    """Return a failed entry for a run that is red although no test failed, such as one that ended early."""
    message = "; ".join(report["reasons"])
    return {"name": "verdict", "status": "failed", "duration": 0, "rawStatus": "red", "message": message}


def relay(written: dict[str, Any], artifact: Path) -> dict[str, Any]:
    """Return the counts of a CTRF report for a relay of continuous integration. Clauses without tests are skipped.

    `artifact` is the report's folder.
    """
    summary = written["results"]["summary"]
    return {name: summary[name] for name in ("passed", "failed", "skipped")} | {"artifact": str(artifact)}
