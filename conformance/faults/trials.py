"""The questions a kill matrix is made of: is a subject green, is a fault killed, does a clause kill anything."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable

from conformance.faults import generated
from conformance.faults.fork import Ending
from conformance.faults.handmade import HANDMADE, find
from conformance.faults.kill_matrix import IdleClause, Kill
from conformance.faults.order import Task, distance, is_about, likeness_to
from conformance.faults.reasons import excuses, idle_reasons
from conformance.faults.worker import Trial
from conformance.judge.clauses import all_clauses


def fault_ids() -> list[str]:
    return [*HANDMADE, *generated.fault_ids()]


def clauses_of(areas: Iterable[str]) -> frozenset[str]:
    asked = set(areas)
    return frozenset(clause.id for clause in all_clauses().values() if clause.area in asked)


@functools.cache
def areas_of(fault_id: str) -> frozenset[str]:
    """The areas that have a clause about the broken name; their tests run until one is red."""
    broken = find(fault_id).breaks
    clauses = all_clauses().values()
    found = frozenset(c.area for c in clauses if any(is_about(name, broken) for name in c.covers))
    if not found:
        raise LookupError(f"no clause is about {broken}, in which {fault_id} lies")
    return found


def asked_about(faults: Iterable[str]) -> frozenset[str]:
    """The clauses whose tests are run on one of these faults."""
    return clauses_of(area for fault_id in faults for area in areas_of(fault_id))


def takes_ranks(fault_id: str) -> bool:
    """Nothing in one process shows it: judging it takes tens of seconds, not two."""
    fault = find(fault_id)
    return fault.on_ranks or fault.breaks.startswith("distributed.")


class RedWithoutFault(Exception):
    """What a test that is red on the subject itself says of a fault is an illusion."""


def killing(package: str, fault_id: str, first: str = "") -> Trial[Kill]:
    """Whether a fault is killed; `first` is the test to begin with."""
    fault = find(fault_id)
    clauses = asked_about([fault_id])
    ending = yield Task(f"{package}+{fault_id}", clauses, fault.about, fault.on_ranks, first)
    return Kill(
        fault=fault_id,
        killed=bool(ending.how),
        clause=ending.clause,
        nodeid=ending.nodeid,
        how=ending.how,
        seconds=ending.seconds,
        says=fault.says,
        thread=fault.thread,
        why=excuses(package).get(fault_id, ""),
    )


def proven(killing: Trial[Kill], package: str, green: set[str]) -> Trial[Kill]:
    """A kill, once the test that did it is known to be green without the fault.

    Args:
        green: the node ids of which that is known; the test's comes to them.

    Raises:
        RedWithoutFault: it is not.
    """
    kill = yield from killing
    yield from prove(kill.nodeid, package, green)
    return kill


def prove(nodeid: str, package: str, green: set[str]) -> Generator[Task, Ending, None]:
    """See that a test is green on the subject itself; `green` as above."""
    if nodeid and nodeid not in green:
        ending = yield Task(package, frozenset(), first=nodeid)
        if ending.how:
            raise RedWithoutFault(f"{nodeid} ({ending.how})")
        green.add(nodeid)


def idle(package: str, clause_id: str, green: set[str], first: str = "") -> Trial[IdleClause]:
    """The faults that a clause might see, one after the other, until its tests alone kill one.

    Args:
        package: the subject.
        clause_id: the clause.
        green: as above.
        first: the fault to begin with.
    """
    why = idle_reasons().get(clause_id, "")
    tried = 0
    for fault_id in sorted(candidates(clause_id), key=lambda one: one != first):
        tried += 1
        ending = yield Task(f"{package}+{fault_id}", frozenset({clause_id}), may_be_empty=True)
        if ending.how:
            yield from prove(ending.nodeid, package, green)
            return IdleClause(clause_id, tried, fault_id, ending.nodeid, why)
        if not ending.asked:
            return IdleClause(clause_id, 0, why="None of its tests can run here.", asked=False)
    return IdleClause(clause_id, tried, why=why)


def candidates(clause_id: str) -> list[str]:
    """The faults that lie in what a clause's area is about: the nearest to it first, then the likest in words."""
    clause = all_clauses()[clause_id]
    found = {fault_id: find(fault_id) for fault_id in fault_ids() if clause.area in areas_of(fault_id)}
    reported = {fault_id: f"{fault_id} {fault.says}" for fault_id, fault in found.items()}
    likeness = likeness_to(f"{clause.id} {clause.says}", reported)
    return sorted(found, key=lambda one: (distance(clause_id, found[one].about), -likeness[one]))
