"""Search for false positives: judge a correct subject with one seed after another. No run may be red.

    python -m conformance.strength.false_positives --subject torch --seeds 20                   seeds 1 to 20 in quick
    python -m conformance.strength.false_positives --subject torch --profile full --seeds 5 --twice
    python -m conformance.strength.false_positives --subject conformance.exact_copy --seeds 5   a copy of torch's source

Each run is one line of the log: commit, seed, verdict, number of tests, seconds, red tests and their replay commands.
With --twice each seed runs twice, and every test must have the same outcome. Exit code 1 means a false positive.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.cli.judging import everything
from conformance.cli.options import PROFILES
from conformance.judge.clauses import HERE
from conformance.judge.judgement import RED
from conformance.judge.results import broken_clauses
from conformance.judge.sandbox import environment

_ROOT = HERE.parent


def main(words: Sequence[str]) -> int:
    options = _options(words)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    commit, failures = environment.commit(), 0
    for seed in range(options.first, options.first + options.seeds):
        outcomes: dict[str, str] = {}
        for number in (1, 2) if options.twice else (1,):
            before = outcomes
            entry, outcomes = _run(options, seed)
            entry = {
                "commit": commit,
                "run": number,
                **entry,
                "unlike_before": different_outcomes(before, outcomes),
            }
            failures += entry["verdict"] != "green" or bool(entry["unlike_before"])
            with options.log.open("a") as log:
                log.write(json.dumps(entry) + "\n")
            print(_describe(entry), flush=True)  # noqa: T201 the command's output
    runs = options.seeds * (2 if options.twice else 1)
    print(f"{runs - failures} of {runs} runs without a false positive; {options.log}")  # noqa: T201
    return 1 if failures else 0


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.strength.false_positives", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--subject", default="torch", help="a correct package (default: torch)")
    parser.add_argument("--profile", default="quick", choices=PROFILES)
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds (default: 20)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first seed (default: 1)")
    parser.add_argument("--twice", action="store_true", help="run each seed twice and compare all outcomes")
    parser.add_argument("--log", type=Path, default=Path("report/false_positives.jsonl"))
    parser.add_argument(
        "tests", nargs="*", default=everything(), help="tests (default: all that judge a subject)"
    )
    return parser.parse_args(words)


def _run(options: argparse.Namespace, seed: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Judge with a seed and return the log's entry and the outcome of each test."""
    began = time.monotonic()
    report = _report(options, seed)
    entry = {
        "subject": options.subject,
        "profile": options.profile,
        "seed": seed,
        "verdict": report["verdict"],
        "outcomes": dict(Counter(test["outcome"] for test in report["tests"]).most_common()),
        "seconds": round(time.monotonic() - began, 1),
        "red": [test["nodeid"] for test in report["tests"] if test["outcome"] in RED],
        "replay": [broken.replay for broken in broken_clauses(report["tests"])],
    }
    return entry, {test["nodeid"]: test["outcome"] for test in report["tests"]}


def _report(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="false-positives-") as directory:
        command = [sys.executable, "-m", "pytest", *options.tests]
        command += ["-q", "-n", "auto", "-p", "no:cacheprovider"]
        command += [f"--subject={options.subject}", f"--profile={options.profile}", f"--seed={seed}"]
        ended = subprocess.run(
            [*command, f"--report={directory}"], cwd=_ROOT, capture_output=True, text=True, check=False
        )
        written = Path(directory, "report.json")
        if ended.returncode not in (0, 1) or not written.is_file():
            raise SystemExit(
                f"seed {seed}: pytest ended with code {ended.returncode}:\n{ended.stdout[-4000:]}"
            )
        return json.loads(written.read_text())


def different_outcomes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before and before.get(name) != now.get(name))


def _describe(entry: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in entry["outcomes"].items())
    lines = [
        f"seed {entry['seed']}, run {entry['run']}: {entry['verdict']} ({counts}) in {entry['seconds']} s"
    ]
    lines += [f"    {command}" for command in entry["replay"]]
    lines += [f"    another outcome than before: {name}" for name in entry["unlike_before"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
