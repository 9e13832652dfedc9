"""Trials for a kill matrix: whether a fault is killed, whether a test is green without it, and what a clause kills."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Generator, Iterable

from conformance.judge.clauses import HERE, all_clauses
from conformance.strength.faults import generated
from conformance.strength.faults.handmade import HANDMADE, find
from conformance.strength.fork import Ending
from conformance.strength.order import Task, distance, is_about, likeness_to
from conformance.strength.results import CLAUSES, FAULTS, KILLED, SURVIVED, UNTESTED, Row
from conformance.strength.worker import Trial


def fault_ids() -> list[str]:
    return [*HANDMADE, *generated.fault_ids()]


def all_excuses() -> dict[str, dict[str, str]]:
    """Return the reasons why faults may survive, by subject and by fault. A reason that is no longer true is red."""
    return tomllib.loads((HERE / "survivors.toml").read_text())


def idle_reasons() -> dict[str, str]:
    """Return the reasons why clauses may kill no fault, by clause. A reason that is no longer true is red."""
    return tomllib.loads((HERE / "idle_clauses.toml").read_text())


def clauses_of(areas: Iterable[str]) -> frozenset[str]:
    chosen = set(areas)
    return frozenset(clause.id for clause in all_clauses().values() if clause.area in chosen)


@functools.cache
def areas_of(fault_id: str) -> frozenset[str]:
    """Return the areas that have a clause about the broken name. Their tests are run for the fault.

    Raises:
        LookupError: there is none.
    """
    broken = find(fault_id).breaks
    clauses = all_clauses().values()
    areas = frozenset(c.area for c in clauses if any(is_about(name, broken) for name in c.covers))
    if not areas:
        raise LookupError(f"no clause covers {broken}, which the fault {fault_id} breaks")
    return areas


def clauses_about(faults: Iterable[str]) -> frozenset[str]:
    """Return the clauses whose tests are run for any of these faults."""
    return clauses_of(area for fault_id in faults for area in areas_of(fault_id))


def needs_ranks(fault_id: str) -> bool:
    """Return whether only ranks show the fault, so that judging it takes tens of seconds instead of two."""
    fault = find(fault_id)
    return fault.on_ranks or fault.breaks.startswith("distributed.")


class RedWithoutFault(Exception):
    """Raised if a test that killed a fault is also red without the fault."""


def judge_fault(package: str, fault_id: str, green: set[str], first: str = "") -> Trial[Row]:
    """Judge a fault and return whether it was killed.

    Args:
        package: the subject.
        fault_id: the fault.
        green: node ids of tests that are known to be green without faults. The killing test is added.
        first: the test to begin with.

    Raises:
        RedWithoutFault: the killing test is red without the fault.
    """
    fault = find(fault_id)
    clauses = clauses_about([fault_id])
    ending = yield Task(f"{package}+{fault_id}", clauses, fault.about, fault.on_ranks, first)
    yield from verify_green(ending.nodeid, package, green)
    why = all_excuses().get(package, {}).get(fault_id, "")
    about_fault = {"says": fault.says, "thread": fault.thread, "why": why}
    return Row(fault_id, FAULTS, KILLED if ending.how else SURVIVED, **about_fault, **ending.columns)


def verify_green(nodeid: str, package: str, green: set[str]) -> Generator[Task, Ending, None]:
    """Check that a test is green without faults, and add it to `green`.

    Raises:
        RedWithoutFault: it is not.
    """
    if nodeid and nodeid not in green:
        ending = yield Task(package, frozenset(), first=nodeid)
        if ending.how:
            raise RedWithoutFault(f"{nodeid} ({ending.how})")
        green.add(nodeid)


def judge_clause(package: str, clause_id: str, green: set[str], first: str = "") -> Trial[Row]:
    """Try the faults that a clause might kill, one after another, until its own tests kill one.

    Args:
        package: the subject.
        clause_id: the clause.
        green: node ids of tests that are known to be green without faults.
        first: the fault to begin with.
    """
    why = idle_reasons().get(clause_id, "")
    row = functools.partial(Row, clause_id, CLAUSES)
    tried, seconds = 0, 0.0
    for fault_id in sorted(candidates(clause_id), key=lambda candidate: candidate != first):
        tried += 1
        ending = yield Task(f"{package}+{fault_id}", frozenset({clause_id}), may_be_empty=True)
        seconds += ending.seconds
        if ending.how:
            yield from verify_green(ending.nodeid, package, green)
            columns = ending.columns | {"seconds": seconds}
            return row(KILLED, fault=fault_id, why=why, tried=tried, **columns)
        if not ending.tests_run:
            return row(UNTESTED, why="None of its tests can run here.")
    return row(SURVIVED, seconds=seconds, why=why, tried=tried)


def candidates(clause_id: str) -> list[str]:
    """Return the faults of a clause's area: the nearest to the clause first, then the most similar in words."""
    clause = all_clauses()[clause_id]
    faults = {fault_id: find(fault_id) for fault_id in fault_ids() if clause.area in areas_of(fault_id)}
    texts = {fault_id: f"{fault_id} {fault.says}" for fault_id, fault in faults.items()}
    likeness = likeness_to(f"{clause.id} {clause.says}", texts)
    return sorted(
        faults, key=lambda fault_id: (distance(clause_id, faults[fault_id].about), -likeness[fault_id])
    )
