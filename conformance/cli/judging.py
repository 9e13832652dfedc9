"""Judging of a subject in a separate process, which ends with a report whatever happens.

`tandem-judge` does this, and so does the gate in its first phase.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.progress import TaskID

from conformance.cli.options import MARKS, PROFILES
from conformance.cli.running import Stop, run
from conformance.cli.terminal import PhaseProgress
from conformance.judge import heading
from conformance.judge.accounting import account
from conformance.judge.clauses import AREAS, HERE, all_clauses
from conformance.judge.files.claims_file import set_claims_file, similar
from conformance.judge.judgement import RED
from conformance.judge.library import package_of
from conformance.judge.results import BAD_INPUT
from conformance.report.merging import mark_flaky

DEADLINES_S = {"smoke": 600.0, "quick": 1200.0, "full": 5400.0, "deep": 86400.0}
_ROOT = HERE.parent
_NO_TESTS = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
_COLLECTING_S = 120.0
_OUTPUTS = ("judgements.jsonl", "judging.log", "junit.xml")


def judge(options: argparse.Namespace, out: Path, progress: PhaseProgress, stop: Stop) -> dict[str, Any]:
    """Judge `options.subject` and return the report. If the suite was stopped, it has the results until then.

    With `options.rerun`, fresh processes judge again, and tests with different outcomes are flaky.
    """
    if options.claims is not None:
        set_claims_file(package_of(options.subject), Path(options.claims))
    reports = [_judge_once(options, out, progress, stop)]
    while len(reports) <= options.rerun and not (reports[-1]["ended_early"] or reports[-1]["bad_input"]):
        reports.append(_judge_once(options, out, progress, stop))
    return mark_flaky(reports) if options.rerun else reports[0]


def _judge_once(
    options: argparse.Namespace, out: Path, progress: PhaseProgress, stop: Stop
) -> dict[str, Any]:
    for name in _OUTPUTS:
        (out / name).unlink(missing_ok=True)
    log = out / "judgements.jsonl"
    bar = _JudgingBar(progress, progress.begin("judging"), log)
    began = time.time()
    ended, code = run(
        _command(options, out), out / "judging.log", DEADLINES_S[options.profile], stop, bar.advance
    )
    if code in _NO_TESTS and not ended:
        reported = _explain_no_tests(options, out, stop)
        return _salvaged(options, log, began, "nothing was judged") | {"bad_input": [reported]}
    written = out / "report.json"
    if written.is_file() and written.stat().st_mtime >= began:
        report = json.loads(written.read_text())
        # Codes of pytest: 0 passed, 1 tests failed, 2 bad input, which the report names. Others mean an early end.
        is_complete = code in (0, 1) or (code == BAD_INPUT and report["bad_input"])
        why = ended or ("" if is_complete else f"judging ended with code {code}: {tail(out)}")
        return report | {"ended_early": [why] if why else []}
    if code == BAD_INPUT and not ended:
        # pytest has printed the cause when it ended.
        reported = reported_at_exit((out / "judging.log").read_text(errors="replace"))
        return _salvaged(options, log, began, "nothing was judged") | {"bad_input": [reported]}
    return _salvaged(options, log, began, ended or f"judging ended with code {code}: {tail(out)}")


def _explain_no_tests(options: argparse.Namespace, out: Path, stop: Stop) -> str:
    """Return why no test was collected. Collect again without workers, because pytest prints no error with workers."""
    command = [*_command(options, out), "-n", "0", "--collect-only"]
    _, code = run(command, out / "judging.log", _COLLECTING_S, stop, lambda: None)
    if code == pytest.ExitCode.USAGE_ERROR:
        reported = tail(out)
        reported = reported[max(reported.find("ERROR: "), 0) :]
        return re.sub(r"(?m)^no tests (collected|ran) in .*$", "", reported).strip()
    target, profile = " ".join(getattr(options, "what", ())) or "the suite", options.profile
    larger = PROFILES[PROFILES.index(profile) + 1 :]
    if options.marks != ",".join(MARKS):
        return (
            f"the profile {profile} has no test of {target} with --marks {options.marks}; leave out --marks"
        )
    cure = (
        f"--profile {larger[0]} has more tests"
        if larger
        else "python -m conformance.catalogue lists the clauses"
    )
    return f"the profile {profile} has no test of {target}; {cure}"


def reported_at_exit(log: str) -> str:
    """Return the message that pytest ended with, to the end of the log, because a subject may add any text to it."""
    return f"\n{log}".partition("\nExit: ")[2].strip()


def tail(out: Path, name: str = "judging") -> str:
    return (out / f"{name}.log").read_text(errors="replace")[-1500:].strip()


def chosen_tests(targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths for pytest and the beginnings of clause ids to judge by. No clauses means all.

    Raises:
        ValueError: a target is neither a test nor the beginning of a clause id, or there are both.
    """
    tests = [target for target in targets if "::" in target]
    clauses = [target for target in targets if "::" not in target]
    if tests and clauses:
        raise ValueError(f"got tests ({tests[0]}) and clauses ({clauses[0]}); name either tests or clauses")
    if missing := [word for word in tests if not (_ROOT / word.partition("::")[0]).is_file()]:
        raise ValueError(f"there is no test {missing[0]!r}; the replay commands of a report name tests")
    selected = [clause for clause in all_clauses().values() if clause.is_asked_by(clauses)]
    if unknown := [word for word in clauses if not any(clause.is_asked_by([word]) for clause in selected)]:
        words = [clause.split(".") for clause in all_clauses()]
        areas = {".".join(parts[:count]) for parts in words for count in range(1, len(parts) + 1)}
        raise ValueError(
            f"{unknown[0]!r} is neither a clause nor an area such as amp, nn.utils.clip_grad or distributed.fsdp"
            f"{similar(unknown[0], sorted(areas)) or ';'} python -m conformance.catalogue lists them"
        )
    if not targets:
        return everything(), []
    folders = {HERE.joinpath(*clause.area.split(".")).parent for clause in selected}
    return [*sorted(map(str, folders)), *(str(_ROOT / word) for word in tests)], clauses


def everything() -> list[str]:
    """Return the paths of all tests that judge a subject, without the suite's selftests."""
    return [str(HERE / name) for name in (*AREAS, "test_surface.py") if (HERE / name).exists()]


def _command(options: argparse.Namespace, out: Path) -> list[str]:
    tests, clauses = chosen_tests(getattr(options, "what", ()))
    command = [sys.executable, "-m", "pytest", *tests, f"--rootdir={_ROOT}", *_settings()]
    # Other styles of traceback read the source again for each failure, which takes longer than many tests.
    command += ["-q", "--tb=native", "-p", "no:cacheprovider", "-n", getattr(options, "n", "auto")]
    command += [
        f"--subject={options.subject}",
        f"--device={options.device}",
        f"--world-sizes={options.world_sizes}",
        f"--profile={options.profile}",
        f"--marks={options.marks}",
    ]
    command += [f"--report={out}", f"--junitxml={out / 'junit.xml'}"]
    command += [] if options.shard is None else [f"--shard={options.shard}"]
    command += [] if options.seed is None else [f"--seed={options.seed}"]
    command += [] if options.claims is None else [f"--claims={options.claims}"]
    return command + ([f"--clauses={','.join(clauses)}"] if clauses else [])


def _settings() -> list[str]:
    """Return pytest's settings: those of the checkout, or our own instead of those of the user's project."""
    if heading.CHECKOUT:
        return ["-c", str(_ROOT / "pyproject.toml")]
    return ["-c", os.devnull, "-o", "filterwarnings=default", "-o", "xfail_strict=true", "--strict-markers"]


def _salvaged(options: argparse.Namespace, log: Path, began: float, why: str) -> dict[str, Any]:
    """Return a report from the judgements that were logged before judging ended early."""
    last = {entry["nodeid"]: entry for entry in _Lines(log).new() if "nodeid" in entry}
    words = chosen_tests(getattr(options, "what", ()))[1]
    chosen = {name for name, clause in all_clauses().items() if not words or clause.is_asked_by(words)}
    not_run = account({entry["clause"] for entry in last.values()}, {}, chosen, why)
    return heading.heading(options, began) | {
        "verdict": "red",
        "devices": [],
        "expectations": [],
        "bad_input": [],
        "tests": list(last.values()),
        "not_run": [asdict(result) for result in not_run],
        "ended_early": [why],
    }


class _JudgingBar:
    """A progress bar that follows the log of judgements."""

    def __init__(self, progress: PhaseProgress, task: TaskID, log: Path) -> None:
        self._progress, self._task, self._lines = progress, task, _Lines(log)
        self._collected: int | None = None
        self._first: list[str] = []
        self._has_told_first = False
        # By test, because a test that fails in its teardown has two lines.
        self._outcomes: dict[str, str] = {}

    def advance(self) -> None:
        for entry in self._lines.new():
            if "collected" in entry:
                self._collected = max(entry["collected"], self._collected or 0)
                self._first = entry["first"]
            else:
                self._outcomes[entry["nodeid"]] = entry["outcome"]
        self._tell_first()
        red = sum(outcome in RED for outcome in self._outcomes.values())
        note = f"{red} red" if red else "" if self._outcomes else "collecting"
        self._progress.update(self._task, total=self._collected, completed=len(self._outcomes), note=note)

    def _tell_first(self) -> None:
        """Print the outcome of the first tests as soon as it is known, if others follow."""
        if self._has_told_first or not 0 < len(self._first) < (self._collected or 0):
            return
        if not all(nodeid in self._outcomes for nodeid in self._first):
            return
        self._has_told_first = True
        red = sum(self._outcomes[nodeid] in RED for nodeid in self._first)
        task = self._progress.tasks[self._progress.task_ids.index(self._task)]
        self._progress.console.print(
            f"first {len(self._first)} tests, one for each function of the profile smoke: "
            f"{f'{red} red' if red else 'green'} after {task.elapsed or 0.0:.0f} s; the others follow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


class _Lines:
    """Reader of a log that another process is writing. It yields each entry once, when its line is complete."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_bytes = 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._log.is_file():
            return
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):  # incomplete, read again by the next call
                    return
                self._read_bytes += len(line)
                yield json.loads(line)
