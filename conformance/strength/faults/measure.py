"""Faults: correct subjects with one injected bug each, which the unmodified suite must detect.

    python -m conformance.strength faults                 inject every fault into impl; print and write the kill matrix
    python -m conformance.strength faults --clauses       also for each clause that was the first to kill none
    python -m conformance.strength faults --subject torch inject the faults into torch
    python -m conformance.strength faults --list          list the faults
    python -m conformance.strength faults --only scale    only faults whose name contains a word
    python -m conformance.strength faults --resume        only faults that a stopped run of the commit did not judge
    python -m conformance.strength faults --remember      also record the killing tests in killers.json, for later runs

There are two types of faults, both named after a `+` in a subject's spec (`impl+ignore:amp.GradScaler(init_scale)`):
    generated  one for each parameter, method and getter of the public surface (`generated.py`)
    handmade   one for each bug that a real implementation once had (`handmade/`, at torch's paths), and for each bug
               of ours that no operator of mutation makes, such as a wrong number at the end of a long gradient

A worker collects the suite once, and each fault is judged in a fork of it. A fault is killed by the first test that
fails, and only if that test passes without the fault. The tests do not know what was injected. Only their order depends
on the broken name and on what killed the fault before, according to the matrix at `--out` or else `killers.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.judge.clauses import all_clauses
from conformance.strength.faults.earlier_kills import load_earlier_kills, remember
from conformance.strength.faults.trials import (
    clauses_about,
    fault_ids,
    judge_clause,
    judge_fault,
    needs_ranks,
)
from conformance.strength.results import CLAUSES, FAULTS, KILLED, UNTESTED, Row, Table, with_places
from conformance.strength.worker import WorkerPool

SUBJECT, OUT = "impl", Path("report/kills.json")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", default="", metavar="WORD", help="only faults whose name contains this word")
    text = "also find a fault for each clause that was the first to kill none"
    add("--clauses", action="store_true", help=text)
    add("--remember", action="store_true", help="record the killing tests in killers.json, for later runs")
    add("--list", action="store_true", help="only list the faults")


def check_options(options: argparse.Namespace) -> dict[str, Any]:
    if options.clauses and options.only:
        raise ValueError("--clauses needs all faults; remove --only")
    options.ids = [fault_id for fault_id in fault_ids() if options.only in fault_id]
    if not options.ids:
        raise ValueError(f"no fault has {options.only!r} in its name; --list shows the names")
    options.listed = options.ids if options.list else []
    return {}


def judge(options: argparse.Namespace, table: Table) -> Iterator[tuple[str, Row]]:
    clauses = clauses_about(options.ids) if options.only else ()
    with WorkerPool(options.subject, options.jobs, clauses=clauses) as pool:
        yield from _judge_faults(pool, table, options.ids, options.out)
        if options.clauses:
            yield from _judge_idle_clauses(pool, table, options.out)
    if any(row.outcome == UNTESTED for row in table.rows):
        # The profile full has tests of clauses that have none in the profile quick.
        with WorkerPool(options.subject, options.jobs, "full") as pool:
            yield from _judge_idle_clauses(pool, table, options.out)
    table.complete = {row.name for row in table.of(FAULTS)} >= set(fault_ids())


def _judge_faults(pool: WorkerPool, table: Table, ids: Sequence[str], out: Path) -> Iterator[tuple[str, Row]]:
    """Judge all faults. Faults that need ranks take the longest and come last."""
    judged = {row.name for row in table.rows}
    green = {row.nodeid for row in table.of(FAULTS)}
    left = sorted((fault_id for fault_id in ids if fault_id not in judged), key=needs_ranks)
    first = load_earlier_kills(out).faults
    trials = (judge_fault(table.subject, fault_id, green, first.get(fault_id, "")) for fault_id in left)
    yield from with_places(pool.run(trials), len(left))


def _judge_idle_clauses(pool: WorkerPool, table: Table, out: Path) -> Iterator[tuple[str, Row]]:
    busy = {row.clause for row in table.of(FAULTS)}
    table.rows[:] = [row for row in table.rows if row.outcome != UNTESTED and row.name not in busy]
    judged = busy.union(row.name for row in table.of(CLAUSES))
    left = [clause_id for clause_id in all_clauses() if clause_id not in judged]
    green = {row.nodeid for row in table.of(FAULTS)}
    first = load_earlier_kills(out).clauses
    trials = (judge_clause(table.subject, clause_id, green, first.get(clause_id, "")) for clause_id in left)
    yield from with_places(pool.run(trials), len(left))


def sum_up(options: argparse.Namespace, table: Table, say: Callable[[str], None]) -> bool:
    """Print a summary with the faults that survived and the clauses that kill none. Return whether any is not due."""
    if options.remember:
        remember(table)
    faults = table.of(FAULTS)
    say(f"{sum(row.outcome == KILLED for row in faults)} of {len(faults)} killed in {table.seconds:.0f} s")
    for row in table.rows:
        if row.why or row.outcome != KILLED:
            say(f"{row.name}: {row.text}")
    return not all(row.is_due for row in table.rows)
