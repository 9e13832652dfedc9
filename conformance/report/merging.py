"""Joining of several reports: the shards of one run, or runs of the same tests that may differ."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from conformance.judge.accounting import OTHER_SHARD, NotRun, account
from conformance.judge.files.claims_file import Expectation
from conformance.judge.files.expectations import Expectations, TestRecord
from conformance.judge.judgement import FLAKY, Judgement
from conformance.judge.results import EXPECTATION, provides_nothing, stale_expectations

_SAME = ("subject", "torch", "profile", "marks", "seed", "device", "world_sizes")
_GIVEN_UP = "not run: "  # beginning of the reason after hangs of the clause


def merge_shards(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the report of all shards of a run.

    Raises:
        ValueError: a shard is missing or duplicated, or the shards divided different tests.
    """
    first = reports[0]
    for key in _SAME:
        if len({str(report.get(key)) for report in reports}) > 1:
            raise ValueError(
                f"the shards differ in {key}: {', '.join(str(report.get(key)) for report in reports)}"
            )
    if len({report["suite"]["catalogue"] for report in reports}) > 1:
        raise ValueError("the shards have different catalogues; judge all of them with the same suite")
    if len({report["selection"] for report in reports if report.get("selection")}) > 1:
        raise ValueError(
            "the shards divided different tests; run all of them with the same clauses, packages and devices"
        )
    count = _shard(first)[1]
    names = [f"{number}/{count}" for number, count in sorted(map(_shard, reports))]
    expected = [f"{number}/{count}" for number in range(1, count + 1)]
    if names != expected:
        raise ValueError(f"got the shards {', '.join(names)}; expected {', '.join(expected)}")
    tests = {
        test["nodeid"]: test
        for report in reports
        for test in report["tests"]
        if not test["nodeid"].startswith(EXPECTATION)
    }
    rows = [_expectation(row) for row in first["expectations"]]
    ended_early = [why for report in reports for why in report["ended_early"]]
    is_narrowed = any(report.get("is_narrowed", False) for report in reports)
    records = [
        TestRecord(test["nodeid"], test["clause"], test["outcome"], test["draws"]) for test in tests.values()
    ]
    results = Expectations(rows, datetime.datetime.now(datetime.UTC).date()).evaluate(
        records, is_complete=not ended_early and not is_narrowed
    )
    tests |= {judgement.nodeid: asdict(judgement) for judgement in stale_expectations(results, records)}
    known = {
        result["clause"]: NotRun(**result)
        for report in reports
        for result in report["not_run"]
        if result["reason"] != OTHER_SHARD
    }
    judged = [Judgement(**test) for test in tests.values()]
    not_run = account({test["clause"] for test in tests.values()}, known, (), "")
    return first | {
        "shard": None,
        "began": min(report["began"] for report in reports),
        "seconds": round(sum(report["seconds"] for report in reports), 1),
        "devices": sorted({device for report in reports for device in report["devices"]}),
        "tests": sorted(tests.values(), key=lambda test: test["nodeid"]),
        "not_run": [asdict(result) for result in not_run],
        "expectations": [result.as_dict() for result in results],
        "ended_early": ended_early,
        "bad_input": list(dict.fromkeys(sentence for report in reports for sentence in report["bad_input"])),
        "is_narrowed": is_narrowed,
        "provides_nothing": all(report.get("provides_nothing", False) for report in reports)
        or provides_nothing([*judged, *not_run], None),
        "baseline": None,  # an earlier report was compared with one shard only
    }


def _shard(report: dict[str, Any]) -> tuple[int, int]:
    """Return the number of a shard and how many there are. A report of all tests is the only shard."""
    number, count = (report.get("shard") or "1/1").split("/")
    return int(number), int(count)


def _expectation(row: dict[str, Any]) -> Expectation:
    expires = datetime.date.fromisoformat(row["expires"])
    return Expectation(row["clause"], row["test"], row["reason"], expires, row["link"])


def mark_flaky(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of several reports with the same seed. Tests with different outcomes are flaky in it.

    It gets the tests of clauses that only a later run tested, because a subject may lack a name in one run only.
    """
    first: dict[str, dict[str, Any]] = {}
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for test in (test for report in reports for test in report["tests"]):
        first.setdefault(test["nodeid"], test)
        if not test["reason"].startswith(_GIVEN_UP):
            outcomes.setdefault(test["nodeid"], []).append(test)
    tested = {test["clause"] for test in first.values()}
    return reports[0] | {
        "tests": [_flaky(test, outcomes.get(nodeid, [test])) for nodeid, test in first.items()],
        "not_run": [result for result in reports[0]["not_run"] if result["clause"] not in tested],
        "seconds": round(sum(report["seconds"] for report in reports), 1),
        "ended_early": list(dict.fromkeys(why for report in reports for why in report["ended_early"])),
        "bad_input": list(dict.fromkeys(sentence for report in reports for sentence in report["bad_input"])),
        "reruns": len(reports) - 1,
    }


def _flaky(test: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len({run["outcome"] for run in runs}) == 1:
        return dict(runs[0])  # first run that did not give up the clause
    worst = next((run for run in runs if run["replay"]), test)
    reason = f"{', '.join(run['outcome'] for run in runs)} in {len(runs)} runs with the same seed\n{worst['reason']}"
    return worst | {"outcome": FLAKY, "reason": reason.strip()}
