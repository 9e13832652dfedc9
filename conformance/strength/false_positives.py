"""Search for false positives: judge a correct subject with one seed after another. No run may be red.

    python -m conformance.strength false-positives --subject torch --seeds 20                   seeds 1 to 20 in quick
    python -m conformance.strength false-positives --subject torch --profile full --seeds 5 --twice
    python -m conformance.strength false-positives --subject conformance.exact_copy --seeds 5   a copy of torch's source

Each run is one row: its verdict, number of tests, seconds, first red test and the replay commands of all. With --twice
each seed runs twice, and every test must have the same outcome. Exit code 1 means a false positive.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conformance.cli.judging import everything
from conformance.cli.options import PROFILES
from conformance.judge.judgement import RED
from conformance.judge.results import broken_clauses
from conformance.strength.pytest_run import run_pytest
from conformance.strength.results import GREEN, RED_RUN, RUNS, Row, Table

SUBJECT, OUT = "torch", Path("report/false_positives.json")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", default="quick", choices=PROFILES)
    add("--seeds", type=int, default=20, help="number of seeds (default: 20)")
    add("--first", type=int, default=1, metavar="SEED", help="the first seed (default: 1)")
    add("--twice", action="store_true", help="run each seed twice and compare all outcomes")
    add("tests", nargs="*", default=everything(), help="tests (default: all that judge a subject)")


def check_options(options: argparse.Namespace) -> dict[str, Any]:
    names = ("profile", "seeds", "first", "twice", "tests")
    return {name: getattr(options, name) for name in names}


def judge(options: argparse.Namespace, table: Table) -> Iterator[tuple[str, Row]]:
    judged = {row.name for row in table.rows}
    for seed in range(options.first, options.first + options.seeds):
        before: dict[str, str] = {}
        names = [f"seed {seed}, run {number}" for number in ((1, 2) if options.twice else (1,))]
        if judged.issuperset(names):
            continue
        # The second run of a seed is compared with the first, so both run again after a stop between them.
        table.rows[:] = [row for row in table.rows if row.name not in names]
        for name in names:
            row, before = _run(options, seed, name, before)
            yield f"{seed - options.first + 1}/{options.seeds}", row
    table.complete = True


def _run(
    options: argparse.Namespace, seed: int, name: str, before: dict[str, str]
) -> tuple[Row, dict[str, str]]:
    """Judge with a seed and return the row and the outcome of each test."""
    began = time.monotonic()
    words = [f"--profile={options.profile}", f"--seed={seed}"]
    with tempfile.TemporaryDirectory(prefix="false-positives-") as folder:
        report = run_pytest(options.subject, Path(folder), options.jobs, [*words, *options.tests])
    tests = report["tests"]
    counts = Counter(test["outcome"] for test in tests).most_common()
    lines = [", ".join(f"{count} {outcome}" for outcome, count in counts)]
    lines += [broken.replay for broken in broken_clauses(tests)]
    outcomes = {test["nodeid"]: test["outcome"] for test in tests}
    others = different_outcomes(before, outcomes)
    lines += [f"another outcome than before: {nodeid}" for nodeid in others]
    red = [test for test in tests if test["outcome"] in RED]
    row = Row(
        name,
        RUNS,
        GREEN if report["verdict"] == GREEN and tests and not others else RED_RUN,
        nodeid=red[0]["nodeid"] if red else "",
        clause=red[0]["clause"] if red else "",
        how=red[0]["outcome"] if red else "",
        seconds=round(time.monotonic() - began, 1),
        says="\n    ".join(lines),
    )
    return row, outcomes


def different_outcomes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before and before.get(name) != now.get(name))


def sum_up(options: argparse.Namespace, table: Table, say: Callable[[str], None]) -> bool:
    red = [row for row in table.rows if row.outcome != GREEN]
    say(f"{len(table.rows) - len(red)} of {len(table.rows)} runs without a false positive; {options.out}")
    return bool(red)
