"""Mutation testing: the strength of the suite against small random changes of torch's own source.

    python -m conformance.strength mutation --sample 100 --seed 7                 a sample of each group in the copy
    python -m conformance.strength mutation --group clipping --group autocast     only these groups
    python -m conformance.strength mutation --subject impl                        mutants of impl
    python -m conformance.strength mutation --show amp.grad_scaler:return_early:0     the changed lines of one mutant

A mutant is one change of the syntax tree of one file, made by an operator (`operators.py`). A sample is drawn at random
from all mutants of a group of files (`groups.py`), from each operator in turn. The spec of a mutant is
`impl+mutant:amp.grad_scaler:return_early:0`. It is judged by the tests of the profile quick that reach the changed
line, the fastest first, until a test is red that is green without the change. The command prints the
share of killed mutants with its 95% interval, and each survivor with its changed lines.

Two kinds of mutants do not count in the share. An *unreached* mutant changes a line that no test reaches on this
device. An *equivalent* mutant behaves the same according to a note in `equivalent.toml`. If more than 10% have such
notes, or the lines of a note do not exist, the command reports it and ends with exit code 1.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from conformance.exact_copy.copying import ROOT
from conformance.strength.faults.trials import verify_green
from conformance.strength.mutation import lines
from conformance.strength.mutation.groups import (
    GROUPS,
    MUTANT,
    Mutant,
    clauses_of,
    diff,
    draw,
    equivalence_note,
    find_mutant,
    key_of,
    stale_notes,
)
from conformance.strength.mutation.reach import Reach, measure_reach
from conformance.strength.mutation.score import MOST_EQUIVALENT, Score
from conformance.strength.order import Task
from conformance.strength.results import (
    EQUIVALENT,
    KILLED,
    MUTANTS,
    SURVIVED,
    UNREACHED,
    Row,
    Table,
    with_places,
)
from conformance.strength.worker import Trial, WorkerPool

SUBJECT, OUT = ROOT, Path("report/mutation.json")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sample", type=int, default=100, help="number of mutants of each group (default: 100)")
    add("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    add("--group", action="append", choices=[group.name for group in GROUPS], help="group (default: all)")
    add("--show", metavar="MUTANT", help="only print the changed lines of a mutant")


def check_options(options: argparse.Namespace) -> dict[str, Any]:
    if options.sample < 1:
        raise ValueError(f"--sample is {options.sample}; expected at least 1")
    if options.show:
        options.listed = diff(options.subject, find_mutant(options.subject, options.show))
    options.groups = [group for group in GROUPS if not options.group or group.name in options.group]
    names = [group.name for group in options.groups]
    return {"sample": options.sample, "seed": options.seed, "groups": names, "torch": torch.__version__}


def judge(options: argparse.Namespace, table: Table) -> Iterator[tuple[str, Row]]:
    reach = measure_reach(options.subject, options.groups, options.jobs)
    judged = {row.name for row in table.rows}
    left = [
        mutant
        for group in options.groups
        for mutant in draw(group, options.subject, options.sample, options.seed)
        if mutant.fault_id not in judged
    ]
    clauses = frozenset[str]().union(*map(clauses_of, options.groups))
    with WorkerPool(options.subject, options.jobs, clauses=clauses) as pool:
        yield from with_places(_judge_mutants(pool, options, left, reach), len(left))
    table.complete = True


def _judge_mutants(
    pool: WorkerPool, options: argparse.Namespace, mutants: Sequence[Mutant], reach: Reach
) -> Iterator[Row]:
    numbers = lines.numbered(options.subject)
    green: set[str] = set()
    killers: Counter[str] = Counter()
    trials: list[Trial[Row]] = []
    for mutant in mutants:
        tests = reach.tests_of(numbers[mutant.module].start + mutant.site.line, mutant.group)
        if note := equivalence_note(options.subject, mutant):
            yield row_of(mutant, EQUIVALENT, why=note)
        elif not tests:
            yield row_of(mutant, UNREACHED)
        else:
            trials.append(_judge_mutant(options.subject, mutant, tests, green, killers))
    yield from pool.run(trials)


def row_of(mutant: Mutant, outcome: str, **more: Any) -> Row:
    return Row(mutant.fault_id, MUTANTS, outcome, group=mutant.group.name, **more)


def _judge_mutant(
    package: str, mutant: Mutant, tests: Sequence[str], green: set[str], killers: Counter[str]
) -> Trial[Row]:
    ordered = sorted(tests, key=lambda test: -killers[test])  # the most successful tests first
    ending = yield Task(f"{package}+{mutant.fault_id}", frozenset(), tests=tuple(ordered))
    if not ending.how:
        says = f"in {mutant.site.function}, passed the {len(tests)} tests that reach it"
        return row_of(mutant, SURVIVED, seconds=ending.seconds, says=says)
    yield from verify_green(ending.nodeid, package, green)
    killers[ending.nodeid] += 1
    return row_of(mutant, KILLED, says=f"in {mutant.site.function}", **ending.columns)


def sum_up(options: argparse.Namespace, table: Table, say: Callable[[str], None]) -> bool:
    """Print survivors, scores, and problems of the equivalence notes. Return whether there are such problems."""
    for row in table.rows:
        if row.outcome in (SURVIVED, UNREACHED):
            mutant = find_mutant(table.subject, row.name.removeprefix(MUTANT))
            say(f"\n{row.outcome}: {table.subject}+{row.name}\n{key_of(table.subject, mutant)}")
            say("\n".join(diff(table.subject, mutant)))
    say(f"\n{table.subject}, seed {options.seed}, torch {torch.__version__}, in {table.seconds:.0f} s")
    doubts = [
        f"STALE: {table.subject} has no mutant {key}; check the lines of its note in equivalent.toml"
        for key in stale_notes(table.subject)
    ]
    for group in options.groups:
        score = Score.of([row.outcome for row in table.rows if row.group == group.name])
        say(f"  {group.name}: {score}")
        if score.depends_on_notes:
            share = f"more than {MOST_EQUIVALENT:.0%} of the reached mutants"
            doubts.append(f"TOO MANY EQUIVALENT: {share} of {group.name} have notes")
    for line in doubts:
        say(line)
    return bool(doubts)
