"""The command: a sample of each group, and what became of it."""

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

from conformance import mutation
from conformance.exact_copy.copying import ROOT
from conformance.faults.order import Task
from conformance.faults.trials import RedWithoutFault, verify_green
from conformance.faults.worker import Trial, WorkerPool
from conformance.judge import environment
from conformance.judge.errors import raise_stopped_by_user
from conformance.mutation import lines
from conformance.mutation.groups import (
    GROUPS,
    Mutant,
    MutationGroup,
    clauses_of,
    diff,
    draw,
    is_idle,
    key_of,
    mutant_called,
    proof_of,
    stale_proofs,
)
from conformance.mutation.reach import Reach, measure
from conformance.mutation.score import EQUIVALENT, IDLE, KILLED, MOST_EQUIVALENT, SURVIVED, UNREACHED, Score

AS_EXPECTED, DISPUTABLE, NOT_JUDGED, STOPPED = 0, 1, 2, 130
_say = functools.partial(print, flush=True)


@dataclass(frozen=True)
class MutantResult:
    mutant: Mutant
    status: str
    why: str = ""  # the test that killed it, how many did not, or the proof that it does the same
    seconds: float = 0.0


def main(words: Sequence[str]) -> int:
    options = _options(words)
    signal.signal(signal.SIGTERM, raise_stopped_by_user)
    if options.show:
        _say("\n".join(diff(options.subject, mutant_called(options.subject, options.show))))
        return AS_EXPECTED
    results: dict[str, list[MutantResult]] = {}
    began = time.monotonic()
    try:
        _say("measuring which lines each test reaches")
        reach = measure(options.subject, options.groups, options.jobs, options.reach)
        clauses = frozenset[str]().union(*map(clauses_of, options.groups))
        with WorkerPool(options.subject, options.jobs, clauses=clauses) as pool:
            for group in options.groups:
                results[group.name] = found = []
                for result in _judged(pool, options, group, reach):
                    found.append(result)
                    _tell(result, len(found))
    except RedWithoutFault as error:
        _say(f"{options.subject} is red without a mistake: {error}")
        return NOT_JUDGED
    except KeyboardInterrupt:
        _say("stopped")
        return STOPPED
    finally:
        _sum_up(options, results, time.monotonic() - began)
    return DISPUTABLE if _disputes(options.subject, results) else AS_EXPECTED


def _disputes(subject: str, results: dict[str, list[MutantResult]]) -> int:
    """Tells each reason not to trust the proofs that the scores stand on; how many there are."""
    reported = [
        f"STALE: no mutant of {subject} is {key}; look at its lines again, in equivalent.toml"
        for key in stale_proofs(subject)
    ]
    for name, found in results.items():
        if Score.of([result.status for result in found]).leans_on_proofs:
            reported.append(
                f"TOO MANY EQUIVALENT: proofs leave out more than {MOST_EQUIVALENT:.0%} of what is reached in {name}"
            )
    for line in reported:
        _say(line)
    return len(reported)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.mutation",
        description=mutation.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--subject", default=ROOT, help="whose source is mutated: the exact copy of torch, or impl")
    add("--sample", type=int, default=100, help="mutants of each group")
    add("--seed", type=int, default=0, help="of the draw")
    add("--group", action="append", choices=[group.name for group in GROUPS], help="default: all")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once (default: one a core)")
    add("--show", metavar="MUTANT", help="only print the lines of one")
    add("--reach", type=Path, help="a file that keeps which lines tests reach, for the next run")
    add(
        "--patience",
        type=float,
        default=math.inf,
        help="seconds of tests, as measured, after which a mutant counts as a survivor (default: all that reach it)",
    )
    add("--out", type=Path, default=Path("report/mutation.json"), help="where the results go")
    options = parser.parse_args(words)
    options.groups = [group for group in GROUPS if not options.group or group.name in options.group]
    if options.jobs < 1 or options.sample < 1:
        parser.error("--jobs and --sample are at least 1")
    return options


def _judged(
    pool: WorkerPool, options: argparse.Namespace, group: MutationGroup, reach: Reach
) -> Iterable[MutantResult]:
    _say(f"{group.name}:")
    numbers = lines.numbered(options.subject)
    green: set[str] = set()
    killers: Counter[str] = Counter()
    trials: list[Trial[MutantResult]] = []
    for mutant in draw(group, options.subject, options.sample, options.seed):
        tests = reach.tests_of(numbers[mutant.module].start + mutant.site.line, group)
        if proof := proof_of(options.subject, mutant):
            yield MutantResult(mutant, EQUIVALENT, proof)
        elif not tests:
            yield MutantResult(mutant, UNREACHED)
        elif is_idle(options.subject, mutant):
            yield MutantResult(mutant, IDLE, "what it leaves out is an empty function of torch.cpu")
        else:
            within = reach.within(tests, options.patience)
            trials.append(_killing(options.subject, mutant, within, len(tests), green, killers))
    yield from pool.run(trials)


def _killing(
    package: str, mutant: Mutant, tests: Sequence[str], reaching: int, green: set[str], killers: Counter[str]
) -> Trial[MutantResult]:
    first = sorted(tests, key=lambda test: -killers[test])  # what has killed others comes before the rest
    ending = yield Task(f"{package}+{mutant.fault_id}", frozenset(), tests=tuple(first))
    if not ending.how:
        return MutantResult(
            mutant, SURVIVED, f"{len(tests)} of the {reaching} tests that reach it", ending.seconds
        )
    yield from verify_green(ending.nodeid, package, green)
    killers[ending.nodeid] += 1
    return MutantResult(mutant, KILLED, ending.nodeid, ending.seconds)


def _tell(result: MutantResult, number: int) -> None:
    site = result.mutant.site
    _say(
        f"[{number}] {result.seconds:6.1f} s  {result.status}: {result.mutant.fault_id} in {site.function} {result.why}"
    )


def _sum_up(options: argparse.Namespace, results: dict[str, list[MutantResult]], seconds: float) -> None:
    for found in results.values():
        for result in found:
            if result.status in (SURVIVED, UNREACHED):
                _say(f"\n{result.status}: {options.subject}+{result.mutant.fault_id}")
                _say(key_of(options.subject, result.mutant))
                _say("\n".join(diff(options.subject, result.mutant)))
    _say(f"\n{options.subject}, seed {options.seed}, torch {torch.__version__}, in {seconds:.0f} s")
    for name, found in results.items():
        _say(f"  {name}: {Score.of([result.status for result in found])}")
    written = {
        "subject": options.subject,
        "seed": options.seed,
        "sample": options.sample,
        "commit": environment.commit(),
        "results": [
            {"group": name, "mutant": result.mutant.fault_id, "status": result.status, "why": result.why}
            for name, found in results.items()
            for result in found
        ],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
