"""Judging a subject from outside: the suite runs in a process of its own, and ends in a report whatever happens.

It is what `tandem-judge` does, and the first part of the gate.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress, TaskID

from conformance.judge import heading, terminal
from conformance.judge.claims_file import give
from conformance.judge.clauses import AREAS, HERE, all_clauses
from conformance.judge.judgement import RED
from conformance.judge.library import package_of
from conformance.judge.options import PROFILES
from conformance.judge.results import BAD_INPUT
from conformance.judge.running import Stop, run

DEADLINES_S = {"quick": 1200.0, "full": 5400.0, "deep": 86400.0}
_ROOT = HERE.parent
_NOTHING_ASKED = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
_COLLECTING_S = 120.0
_MADE = ("judgements.jsonl", "judging.log", "junit.xml")


def judged(options: argparse.Namespace, out: Path, progress: Progress, stop: Stop) -> dict[str, Any]:
    """The report on `options.subject`; where the suite was ended, of what it had judged by then."""
    if options.claims is not None:
        give(package_of(options.subject), Path(options.claims))
    for name in _MADE:
        (out / name).unlink(missing_ok=True)
    log = out / "judgements.jsonl"
    bar = _JudgingBar(progress, terminal.begin(progress, "judging", None), log)
    began = time.time()
    ended, code = run(
        _command(options, out), out / "judging.log", DEADLINES_S[options.profile], stop, bar.advance
    )
    if code in _NOTHING_ASKED and not ended:
        reported = _nothing_asked(options, out, stop)
        return _salvaged(options, log, began, "nothing was judged") | {"bad_input": [reported]}
    written = out / "report.json"
    if written.is_file() and written.stat().st_mtime >= began:
        report = json.loads(written.read_text())
        # pytest: 0 passed, 1 tests failed, 2 bad input (which the report tells); anything else came before its time.
        is_whole = code in (0, 1) or (code == BAD_INPUT and report["bad_input"])
        why = ended or ("" if is_whole else f"judging ended with code {code}: {tail(out)}")
        return report | {"ended_early": [why] if why else []}
    if code == BAD_INPUT and not ended:  # which pytest has told as it ended
        reported = reported_at_exit((out / "judging.log").read_text(errors="replace"))
        return _salvaged(options, log, began, "nothing was judged") | {"bad_input": [reported]}
    return _salvaged(options, log, began, ended or f"judging ended with code {code}: {tail(out)}")


def _nothing_asked(options: argparse.Namespace, out: Path, stop: Stop) -> str:
    """pytest's own words, if it has some: it has none for whoever has workers, so it collects once more, alone."""
    command = [*_command(options, out), "-n", "0", "--collect-only"]
    _, code = run(command, out / "judging.log", _COLLECTING_S, stop, lambda: None)
    if code == pytest.ExitCode.USAGE_ERROR:
        reported = tail(out)
        reported = reported[max(reported.find("ERROR: "), 0) :]
        return re.sub(
            r"(?m)^no tests (collected|ran) in .*$", "", reported
        ).strip()  # before the error or behind it
    asked, profile = " ".join(getattr(options, "what", ())) or "the suite", options.profile
    larger = PROFILES[PROFILES.index(profile) + 1 :]
    cure = (
        f"--profile {larger[0]} asks more" if larger else "python -m conformance.catalogue lists the clauses"
    )
    return f"the profile {profile} has no test of {asked}; {cure}"


def reported_at_exit(log: str) -> str:
    """What pytest was ended with: all from there, since a subject's own words, of any length, may be part of it."""
    return f"\n{log}".partition("\nExit: ")[2].strip()


def tail(out: Path, name: str = "judging") -> str:
    return (out / f"{name}.log").read_text(errors="replace")[-1500:].strip()


def chosen_tests(what: Sequence[str], subject: str) -> tuple[list[str], list[str]]:
    """What pytest is given, and the clauses that are asked: paths and beginnings of clauses; none of these asks all.

    Raises:
        ValueError: something is neither a test, nor a clause, nor the beginning of some; or both kinds are named.
    """
    tests = [word for word in what if "::" in word]
    clauses = [word for word in what if "::" not in word]
    if tests and clauses:
        raise ValueError(f"name tests ({tests[0]}) or clauses ({clauses[0]}), not both at once")
    if missing := [word for word in tests if not _file_of(word).is_file()]:
        raise ValueError(f"there is no test {missing[0]!r}; a report's replay commands name them")
    asked = [found for found in all_clauses().values() if found.is_asked_by(clauses)]
    if unknown := [word for word in clauses if not any(found.is_asked_by([word]) for found in asked)]:
        raise ValueError(
            f"{unknown[0]!r} is no clause and no area such as amp, nn.utils.clip_grad or distributed.fsdp; "
            "python -m conformance.catalogue lists them"
        )
    if not what:
        return everything(), []
    folders = {HERE.joinpath(*found.area.split(".")).parent for found in asked}
    return [*sorted(map(str, folders)), *(str(_ROOT / word) for word in tests)], clauses


def _file_of(test: str) -> Path:
    return _ROOT / test.partition("::")[0]


def everything() -> list[str]:
    """What judges any subject; not the suite's own tests, nor those of `impl`'s insides."""
    return [str(HERE / name) for name in (*AREAS, "test_surface.py") if (HERE / name).exists()]


def _command(options: argparse.Namespace, out: Path) -> list[str]:
    tests, clauses = chosen_tests(getattr(options, "what", ()), options.subject)
    command = [sys.executable, "-m", "pytest", *tests, f"--rootdir={_ROOT}", *_settings()]
    # Other ways to tell a failure read the source again for each, which takes longer than many tests do.
    command += ["-q", "--tb=native", "-p", "no:cacheprovider", "-n", getattr(options, "n", "auto")]
    command += [
        f"--subject={options.subject}",
        f"--device={options.device}",
        f"--world-sizes={options.world_sizes}",
        f"--profile={options.profile}",
    ]
    command += [f"--report={out}", f"--junitxml={out / 'junit.xml'}"]
    command += [] if options.seed is None else [f"--seed={options.seed}"]
    command += [] if options.claims is None else [f"--claims={options.claims}"]
    return command + ([f"--clauses={','.join(clauses)}"] if clauses else [])


def _settings() -> list[str]:
    """pytest's, of the checkout; a wheel has none, and those of whoever calls it are not meant for this suite."""
    if heading.CHECKOUT:
        return ["-c", str(_ROOT / "pyproject.toml")]
    return ["-c", os.devnull, "-o", "filterwarnings=default", "-o", "xfail_strict=true", "--strict-markers"]


def _salvaged(options: argparse.Namespace, log: Path, began: float, why: str) -> dict[str, Any]:
    """A report from the lines that were written before judging ended too soon."""
    last = {entry["nodeid"]: entry for entry in _Lines(log).new() if "nodeid" in entry}
    return heading.heading(options, began) | {
        "verdict": "red",
        "devices": [],
        "expectations": [],
        "bad_input": [],
        "tests": list(last.values()),
        "ended_early": [why],
    }


class _JudgingBar:
    """Moves by what each look finds new in the log of judgements."""

    def __init__(self, progress: Progress, task: TaskID, log: Path) -> None:
        self._progress, self._task, self._lines = progress, task, _Lines(log)
        self._collected: int | None = None
        self._outcomes: dict[str, str] = {}  # by test: one that fails in its teardown has two lines

    def advance(self) -> None:
        for entry in self._lines.new():
            if "collected" in entry:
                self._collected = max(entry["collected"], self._collected or 0)
            else:
                self._outcomes[entry["nodeid"]] = entry["outcome"]
        red = sum(outcome in RED for outcome in self._outcomes.values())
        note = f"{red} red" if red else "" if self._outcomes else "collecting"
        self._progress.update(self._task, total=self._collected, completed=len(self._outcomes), note=note)


class _Lines:
    """The entries of a log that another process is writing; each is handed out once, when its line is whole."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_bytes = 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._log.is_file():
            return
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):  # half written: the next look begins with it
                    return
                self._read_bytes += len(line)
                yield json.loads(line)
