"""The command `python -m conformance.strength.mutation`, which judges a sample of mutants of each group."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from conformance.exact_copy.copying import ROOT
from conformance.judge.errors import raise_stopped_by_user
from conformance.judge.sandbox import environment
from conformance.strength import mutation
from conformance.strength.faults.order import Task
from conformance.strength.faults.trials import RedWithoutFault, verify_green
from conformance.strength.faults.worker import Trial, WorkerPool
from conformance.strength.mutation import lines
from conformance.strength.mutation.groups import (
    GROUPS,
    Mutant,
    MutationGroup,
    clauses_of,
    diff,
    draw,
    equivalence_note,
    find_mutant,
    is_idle,
    key_of,
    stale_notes,
)
from conformance.strength.mutation.reach import Reach, measure
from conformance.strength.mutation.score import (
    EQUIVALENT,
    IDLE,
    KILLED,
    MOST_EQUIVALENT,
    SURVIVED,
    UNREACHED,
    Score,
)

AS_EXPECTED, DOUBTFUL, NOT_JUDGED, STOPPED = 0, 1, 2, 130
_print = functools.partial(print, flush=True)


@dataclass(frozen=True)
class MutantResult:
    mutant: Mutant
    status: str
    why: str = ""  # killing test, number of passed tests, or equivalence note
    seconds: float = 0.0


def main(words: Sequence[str]) -> int:
    options = _options(words)
    signal.signal(signal.SIGTERM, raise_stopped_by_user)
    if options.show:
        _print("\n".join(diff(options.subject, find_mutant(options.subject, options.show))))
        return AS_EXPECTED
    results: dict[str, list[MutantResult]] = {}
    began = time.monotonic()
    try:
        _print("measuring which lines each test reaches …")
        reach = measure(options.subject, options.groups, options.jobs, options.reach)
        clauses = frozenset[str]().union(*map(clauses_of, options.groups))
        with WorkerPool(options.subject, options.jobs, clauses=clauses) as pool:
            for group in options.groups:
                results[group.name] = group_results = []
                for result in _judge(pool, options, group, reach):
                    group_results.append(result)
                    _print_result(result, len(group_results))
    except RedWithoutFault as error:
        _print(f"{options.subject} is red without a mutant: {error}")
        return NOT_JUDGED
    except KeyboardInterrupt:
        _print("stopped")
        return STOPPED
    finally:
        _sum_up(options, results, time.monotonic() - began)
    return DOUBTFUL if _print_doubts(options.subject, results) else AS_EXPECTED


def _print_doubts(subject: str, results: dict[str, list[MutantResult]]) -> int:
    """Print each problem of the equivalence notes that the scores depend on, and return their number."""
    doubts = [
        f"STALE: {subject} has no mutant {key}; check the lines of its note in equivalent.toml"
        for key in stale_notes(subject)
    ]
    for name, group_results in results.items():
        if Score.of([result.status for result in group_results]).depends_on_notes:
            doubts.append(
                f"TOO MANY EQUIVALENT: more than {MOST_EQUIVALENT:.0%} of the reached mutants of {name} have notes"
            )
    for line in doubts:
        _print(line)
    return len(doubts)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.strength.mutation",
        description=mutation.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--subject", default=ROOT, help="package to mutate: impl or the exact copy of torch (default)")
    add("--sample", type=int, default=100, help="number of mutants of each group (default: 100)")
    add("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    add("--group", action="append", choices=[group.name for group in GROUPS], help="group (default: all)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="number of workers (default: one per core)")
    add("--show", metavar="MUTANT", help="only print the changed lines of a mutant")
    add("--reach", type=Path, help="file that stores which lines tests reach, for the next run")
    add(
        "--patience",
        type=float,
        default=math.inf,
        help="measured seconds of tests after which a mutant counts as a survivor (default: all tests that reach it)",
    )
    add("--out", type=Path, default=Path("report/mutation.json"), help="file for the results")
    options = parser.parse_args(words)
    options.groups = [group for group in GROUPS if not options.group or group.name in options.group]
    if options.jobs < 1 or options.sample < 1:
        parser.error(f"--jobs is {options.jobs} and --sample is {options.sample}; expected at least 1")
    return options


def _judge(
    pool: WorkerPool, options: argparse.Namespace, group: MutationGroup, reach: Reach
) -> Iterable[MutantResult]:
    _print(f"{group.name}:")
    numbers = lines.numbered(options.subject)
    green: set[str] = set()
    killers: Counter[str] = Counter()
    trials: list[Trial[MutantResult]] = []
    for mutant in draw(group, options.subject, options.sample, options.seed):
        tests = reach.tests_of(numbers[mutant.module].start + mutant.site.line, group)
        if note := equivalence_note(options.subject, mutant):
            yield MutantResult(mutant, EQUIVALENT, note)
        elif not tests:
            yield MutantResult(mutant, UNREACHED)
        elif is_idle(options.subject, mutant):
            yield MutantResult(mutant, IDLE, "the dropped wait is an empty function of torch.cpu")
        else:
            chosen = reach.within(tests, options.patience)
            trials.append(_judge_mutant(options.subject, mutant, chosen, len(tests), green, killers))
    yield from pool.run(trials)


def _judge_mutant(
    package: str, mutant: Mutant, tests: Sequence[str], reaching: int, green: set[str], killers: Counter[str]
) -> Trial[MutantResult]:
    ordered = sorted(tests, key=lambda test: -killers[test])  # the most successful tests first
    ending = yield Task(f"{package}+{mutant.fault_id}", frozenset(), tests=tuple(ordered))
    if not ending.how:
        return MutantResult(
            mutant, SURVIVED, f"passed {len(tests)} of the {reaching} tests that reach it", ending.seconds
        )
    yield from verify_green(ending.nodeid, package, green)
    killers[ending.nodeid] += 1
    return MutantResult(mutant, KILLED, ending.nodeid, ending.seconds)


def _print_result(result: MutantResult, number: int) -> None:
    site = result.mutant.site
    _print(
        f"[{number}] {result.seconds:6.1f} s  {result.status}: {result.mutant.fault_id} in {site.function} {result.why}"
    )


def _sum_up(options: argparse.Namespace, results: dict[str, list[MutantResult]], seconds: float) -> None:
    for group_results in results.values():
        for result in group_results:
            if result.status in (SURVIVED, UNREACHED):
                _print(f"\n{result.status}: {options.subject}+{result.mutant.fault_id}")
                _print(key_of(options.subject, result.mutant))
                _print("\n".join(diff(options.subject, result.mutant)))
    _print(f"\n{options.subject}, seed {options.seed}, torch {torch.__version__}, in {seconds:.0f} s")
    for name, group_results in results.items():
        _print(f"  {name}: {Score.of([result.status for result in group_results])}")
    report = {
        "subject": options.subject,
        "seed": options.seed,
        "sample": options.sample,
        "commit": environment.commit(),
        "results": [
            {"group": name, "mutant": result.mutant.fault_id, "status": result.status, "why": result.why}
            for name, group_results in results.items()
            for result in group_results
        ],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
