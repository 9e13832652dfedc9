"""The verdict of a run: a line each for judging, speed and training, with the reasons if it is red."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from conformance.judge.accounting import NOT_RUN
from conformance.judge.judgement import RED
from conformance.judge.results import BAD_INPUT
from conformance.report.matrix import not_run_by_clause, ranked, tests_by_clause, worst_outcome
from conformance.report.speed import MISSING, REGRESSION, is_faster, is_slower

_WORDS = {
    "passed": "hold",
    "known": "hold like torch",
    "reference cannot run here": "fail for torch too",
    "expected": "fail as expected",
    NOT_RUN: "not selected",
}


@dataclass(frozen=True)
class VerdictPart:
    name: str  # name of the phase and id of its section on the page
    outcome: str  # passed, failed, or not run
    says: str
    reasons: list[str]  # reasons why the run is red


def parts(report: dict[str, Any]) -> list[VerdictPart]:
    """Return the verdict of judging, and of speed and training if they were requested."""
    others = (("speed", _speed), ("training", _training))
    return [_judging(report), *(judge(report[name] or {}) for name, judge in others if name in report)]


def reasons(report: dict[str, Any]) -> list[str]:
    """Return why the verdict is red. The list is empty if it is green."""
    return [reason for part in parts(report) for reason in part.reasons]


def exit_code(report: dict[str, Any]) -> int:
    """Return the exit code: 2 if the input is invalid, else 1 if the verdict is red, else 0."""
    return BAD_INPUT if report["bad_input"] else int(report["verdict"] == "red")


def _judging(report: dict[str, Any]) -> VerdictPart:
    red = ranked(test["outcome"] for test in report["tests"] if test["outcome"] in RED)
    why = list(dict.fromkeys([*report.get("bad_input", []), *report.get("ended_early", [])]))
    why += [f"{count} {_plural('test', count)} {outcome}" for outcome, count in red]
    if report.get("provides_nothing"):
        why.append(_nothing_provided(report))
    worst = {clause: worst_outcome(same) for clause, same in tests_by_clause(report).items() if clause}
    total = f"{len(report['clauses'])} {_plural('clause', len(report['clauses']))}"
    broken = sum(outcome in RED for outcome in worst.values())
    others = ranked(outcome for outcome in worst.values() if outcome not in RED)
    counts = [f"{count} {_WORDS.get(outcome, outcome)}" for outcome, count in reversed(others)]
    says = f"{broken} of {total} broken" if broken else total
    says += f": {', '.join(counts)}" if counts else ""
    accounts = not_run_by_clause(report)
    if untested := ranked(result.outcome for name, result in accounts.items() if name not in worst):
        outcomes = ", ".join(
            f"{count} {_WORDS.get(outcome, outcome)}" for outcome, count in reversed(untested)
        )
        says += f"; {sum(count for _, count in untested)} accounted, not run: {outcomes}"
    own = sum(test["outcome"] in RED for test in report["tests"] if not test["clause"])
    says += f"; {own} {_plural('test', own)} of the suite itself red" if own else ""
    return VerdictPart("judging", "failed" if why else "passed", says, why)


def _nothing_provided(report: dict[str, Any]) -> str:
    results = [*report["tests"], *report.get("not_run", [])]
    names = [result["reason"].rpartition(" ")[2] for result in results if result["outcome"] == "not provided"]
    example = f", such as {names[0]}" if names else ""
    return (
        f"{report['subject']} provides none of the names that are judged{example}; expose them at torch's public "
        "paths, or map them in a claims file"
    )


def _speed(speed: dict[str, Any]) -> VerdictPart:
    rows = speed.get("rows", [])
    failed = [row for row in rows if row["outcome"] == "failed"]
    measured = [row for row in rows if row["outcome"] == "measured"]
    why = [f"benchmark {row['name']} failed: {row['why'].splitlines()[0]}" for row in failed]
    slowed = [row for row in rows if row.get("verdict") in (REGRESSION, MISSING)]
    why += [f"{row['verdict']} of speed: {row.get('reported', row['name'])}" for row in slowed]
    why += _error_of(speed)
    if not rows:
        return VerdictPart("speed", "failed" if why else "not run", "not measured", why)
    says = [f"not judged: {speed['not_judged']}"] if "not_judged" in speed else []
    says += [f"{len(failed)} of {len(rows)} cases failed"] if failed else []
    if measured:
        faster, slower = sum(map(is_faster, measured)), sum(map(is_slower, measured))
        says.append(f"{faster} of {len(measured)} cases surely faster than torch, {slower} surely slower")
        says.append(f"the median is {statistics.median(row['ratio'] for row in measured):.2f} × torch's time")
    says += [f"{len(slowed)} slower than before or gone"] if slowed else []
    says += [f"judged by {speed['against']}"] if "against" in speed else []
    return VerdictPart("speed", "failed" if why else "passed", "; ".join(says), why)


def _training(training: dict[str, Any]) -> VerdictPart:
    runs = training.get("runs", [])
    why = [f"training {run['name']}: {reason}" for run in runs for reason in run["reasons"]]
    why += _error_of(training)
    if not runs:
        return VerdictPart("training", "failed" if why else "not run", "not trained", why)
    differ = sum(not run["agrees"] for run in runs)
    total = f"{len(runs)} {_plural('run', len(runs))}"
    says = f"{differ} of {total} differ from torch" if differ else f"{total} agree with torch"
    missing = training.get("lacking", [])
    says += f"; with torch's {', '.join(missing)}, which the subject lacks" if missing else ""
    return VerdictPart("training", "failed" if why else "passed", says, why)


def _error_of(part: dict[str, Any]) -> Iterable[str]:
    return [part["error"]] if part.get("error") else []


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"
