"""Search for false positives: judge a correct subject with one seed after another. No run may be red.

    python -m conformance.strength false-positives --subject torch --seeds 20                   seeds 1 to 20 in quick
    python -m conformance.strength false-positives --subject torch --profile full --seeds 5
    python -m conformance.strength false-positives --subject conformance.exact_copy --seeds 5   a copy of torch's source

Each run is one row: its verdict, number of tests, seconds, first red test and the replay commands of all. Exit code 1
means a false positive.
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
    add("tests", nargs="*", default=everything(), help="tests (default: all that judge a subject)")


def check_options(options: argparse.Namespace) -> dict[str, Any]:
    names = ("profile", "seeds", "first", "tests")
    return {name: getattr(options, name) for name in names}


def judge(options: argparse.Namespace, table: Table) -> Iterator[tuple[str, Row]]:
    judged = {row.name for row in table.rows}
    for number in range(options.seeds):
        name = f"seed {options.first + number}"
        if name not in judged:
            yield f"{number + 1}/{options.seeds}", _run(options, options.first + number, name)
    table.complete = True


def _run(options: argparse.Namespace, seed: int, name: str) -> Row:
    """Judge with a seed and return the row."""
    began = time.monotonic()
    words = [f"--profile={options.profile}", f"--seed={seed}"]
    with tempfile.TemporaryDirectory(prefix="false-positives-") as folder:
        report = run_pytest(options.subject, Path(folder), options.jobs, [*words, *options.tests])
    tests = report["tests"]
    counts = Counter(test["outcome"] for test in tests).most_common()
    lines = [", ".join(f"{count} {outcome}" for outcome, count in counts)]
    lines += [broken.replay for broken in broken_clauses(tests)]
    red = [test for test in tests if test["outcome"] in RED]
    return Row(
        name,
        RUNS,
        GREEN if report["verdict"] == GREEN and tests else RED_RUN,
        nodeid=red[0]["nodeid"] if red else "",
        clause=red[0]["clause"] if red else "",
        how=red[0]["outcome"] if red else "",
        seconds=round(time.monotonic() - began, 1),
        says="\n    ".join(lines),
    )


def sum_up(options: argparse.Namespace, table: Table, say: Callable[[str], None]) -> bool:
    red = [row for row in table.rows if row.outcome != GREEN]
    say(f"{len(table.rows) - len(red)} of {len(table.rows)} runs without a false positive; {options.out}")
    return bool(red)
