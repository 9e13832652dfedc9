"""Which tests run on a fault, and in what order: the nearest to it first, and the quick ones before the slow."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from conformance.judge import surface
from conformance.judge.clauses import all_clauses, clause_of


@dataclass(frozen=True)
class Task:
    spec: str  # the subject, with the fault in it
    clauses: frozenset[str]  # whose tests run, until one of them is red
    about: str = ""  # the surface item that the fault is about: the tests nearest to it come first
    on_ranks: bool = False  # whether it shows between ranks alone: the tests that start them come first
    first: str = ""  # the node id of a test that runs before these, of whatever clause it is
    tests: tuple[str, ...] = ()  # node ids: these and no others, in this order
    may_be_empty: bool = False  # whether it is right that no test is of these clauses, in this profile


def in_order(items: Sequence[pytest.Item], task: Task) -> list[pytest.Item]:
    """The task's tests, by what they cost and by how near they are to what the fault is about."""
    if task.tests:
        places = {nodeid: place for place, nodeid in enumerate(task.tests)}
        return sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])

    def place(item: pytest.Item) -> tuple[bool, bool, int, int, bool]:
        is_off = task.on_ranks and not spans_ranks(item)
        near = distance(clause_of(item), task.about)
        return item.nodeid != task.first, is_off, cost(item), near, has_drawn_examples(item)

    chosen = [item for item in items if clause_of(item) in task.clauses or item.nodeid == task.first]
    return sorted(chosen, key=place)


def cost(item: pytest.Item) -> int:
    """0 for a test of one example, 1 for many, 2 for sequences of calls, 3 for ranks, 4 for whole libraries on them."""
    assert isinstance(item, pytest.Function)
    function = item.function
    if "sides" in getattr(item, "fixturenames", ()):
        return 4
    if starts_ranks(item):
        return 3
    if "run_state_machine_as_test" in inspect.unwrap(function).__code__.co_names:
        return 2
    return int(has_drawn_examples(item))


def has_drawn_examples(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    return hasattr(item.function, "hypothesis")


def starts_ranks(item: pytest.Item) -> bool:
    return "ranks" in getattr(item, "fixturenames", ())


def spans_ranks(item: pytest.Item) -> bool:
    """Whether it starts more of them than one."""
    parameters = (
        item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    )
    return starts_ranks(item) and parameters.get("world_size") != 1


def distance(clause_id: str, about: str) -> int:
    """0 if the clause covers the item, 1 if the method or function that the item is a parameter of, and so on.

    The tests of names and signatures have no clause, and are as far as can be.
    """
    covers = all_clauses()[clause_id].covers if clause_id else ()
    path = lineage(about)
    return next((i for i, name in enumerate(path) if any(is_about(c, name) for c in covers)), len(path))


def lineage(item: str) -> list[str]:
    """`amp.GradScaler.step(args)`, `amp.GradScaler.step`, `amp.GradScaler`."""
    return list(dict.fromkeys((item, item.partition("(")[0], surface.owner(item))))


def is_about(item: str, name: str) -> bool:
    """Whether the item is what the name says, or part of it."""
    return item == name or item.startswith((f"{name}.", f"{name}("))


def likeness_to(text: str, others: Mapping[str, str]) -> dict[str, float]:
    """How much each of the others shares of a text's words; a word counts the more, the fewer of them have it."""
    words = {key: _stems(other) for key, other in others.items()}
    frequency = Counter(word for found in words.values() for word in found)
    return {key: sum(1 / frequency[word] for word in found & _stems(text)) for key, found in words.items()}


def _stems(text: str) -> set[str]:
    """The beginnings of its longer words."""
    return {word[:6] for word in re.findall(r"[a-z]{4,}", text.lower())}
