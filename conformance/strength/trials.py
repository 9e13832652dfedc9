"""The questions that strength is made of: is a subject green, is a fault killed, does a clause kill anything."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from conformance.clauses import all_clauses
from conformance.plants import CATALOGUE, find, generated
from conformance.strength.fork import Ending, Task
from conformance.strength.kills import Idle, Kill
from conformance.strength.order import distance, is_about
from conformance.strength.reasons import excuses, idle_reasons
from conformance.strength.worker import Trial


def plant_ids() -> list[str]:
    return [*CATALOGUE, *generated.plant_ids()]


def clauses_of(areas: Iterable[str]) -> frozenset[str]:
    wanted = set(areas)
    return frozenset(clause.id for clause in all_clauses().values() if clause.area in wanted)


@functools.cache
def areas_of(plant_id: str) -> frozenset[str]:
    """The areas that have a clause about the broken name; their tests run until one is red."""
    broken = find(plant_id).breaks
    clauses = all_clauses().values()
    found = frozenset(c.area for c in clauses if any(is_about(name, broken) for name in c.covers))
    if not found:
        raise LookupError(f"no clause is about {broken}, in which {plant_id} lies")
    return found


def takes_ranks(plant_id: str) -> bool:
    """Nothing in one process shows it: judging it takes tens of seconds, not two."""
    plant = find(plant_id)
    return plant.on_ranks or plant.breaks.startswith("distributed.")


def unplanted(package: str, area: str) -> Trial[Ending]:
    """Without a fault an area must be green: on a red one every kill would be an illusion."""
    return (yield Task(package, clauses_of([area])))


def killing(package: str, plant_id: str) -> Trial[Kill]:
    plant = find(plant_id)
    ending = yield Task(f"{package}+{plant_id}", clauses_of(areas_of(plant_id)), plant.about, plant.on_ranks)
    return Kill(
        plant=plant_id,
        killed=bool(ending.how),
        clause=ending.clause,
        nodeid=ending.nodeid,
        how=ending.how,
        seconds=ending.seconds,
        says=plant.says,
        thread=plant.thread,
        why=excuses(package).get(plant_id, ""),
    )


def idle(package: str, clause_id: str) -> Trial[Idle]:
    """The faults that a clause might see, one after the other, until its tests alone kill one."""
    why = idle_reasons().get(clause_id, "")
    tried = 0
    for plant_id in candidates(clause_id):
        tried += 1
        ending = yield Task(f"{package}+{plant_id}", frozenset({clause_id}))
        if ending.how:
            return Idle(clause_id, tried, plant_id, ending.nodeid, why)
        if not ending.asked:
            return Idle(clause_id, tried, why="Its tests cannot run on this machine.")
    return Idle(clause_id, tried, why=why)


def candidates(clause_id: str) -> list[str]:
    """The faults that lie in what a clause's area is about, those nearest to what it covers first."""
    area = all_clauses()[clause_id].area
    found = [plant_id for plant_id in plant_ids() if area in areas_of(plant_id)]
    return sorted(found, key=lambda plant_id: distance(clause_id, find(plant_id).about))
