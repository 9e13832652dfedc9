"""Selection and order of the tests for a fault: fast tests first, and among them the nearest to the fault."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from conformance.judge import surface
from conformance.judge.clauses import all_clauses, clause_of, parameters_of


@dataclass(frozen=True)
class Task:
    """A subject to judge until a test is red, with the tests and their order."""

    spec: str  # the subject with its fault
    clauses: frozenset[str]  # the clauses to test
    about: str = ""  # the broken surface item, whose nearest tests come first
    on_ranks: bool = False  # whether tests with several ranks come first
    first: str = ""  # node id of a test to begin with, of any clause
    tests: tuple[str, ...] = ()  # node ids of the only tests, in order
    may_be_empty: bool = False  # whether the clauses may have no test in this profile


def ordered_tests(items: Sequence[pytest.Item], task: Task) -> list[pytest.Item]:
    """Return the task's tests, ordered by cost and by distance to the broken surface item."""
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
    """Return a test's cost: 0 one example, 1 many, 2 sequences of calls, 3 ranks."""
    assert isinstance(item, pytest.Function)
    if starts_ranks(item):
        return 3
    if "run_state_machine_as_test" in inspect.unwrap(item.function).__code__.co_names:
        return 2
    return int(has_drawn_examples(item))


def has_drawn_examples(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    return hasattr(item.function, "hypothesis")


def starts_ranks(item: pytest.Item) -> bool:
    return "ranks" in getattr(item, "fixturenames", ())


def spans_ranks(item: pytest.Item) -> bool:
    """Return whether the test starts more than one rank."""
    return starts_ranks(item) and parameters_of(item).get("world_size") != 1


def distance(clause_id: str, about: str) -> int:
    """Return the distance of a clause to a surface item.

    It is 0 if the clause covers the item, 1 if it covers the method or function of the parameter, and so on. Tests of
    names and signatures have no clause, and the largest distance.
    """
    covers = all_clauses()[clause_id].covers if clause_id else ()
    path = lineage(about)
    return next((i for i, name in enumerate(path) if any(is_about(c, name) for c in covers)), len(path))


def lineage(item: str) -> list[str]:
    """Return an item and its owners, such as `amp.GradScaler.step(args)`, `amp.GradScaler.step`, `amp.GradScaler`."""
    return list(dict.fromkeys((item, item.partition("(")[0], surface.owner(item))))


def is_about(item: str, name: str) -> bool:
    """Return whether the item has the name or belongs to it."""
    return item == name or item.startswith((f"{name}.", f"{name}("))


def likeness_to(text: str, others: Mapping[str, str]) -> dict[str, float]:
    """Return how similar each other text is to `text`. A shared word counts more if fewer texts have it."""
    words = {key: _stems(other) for key, other in others.items()}
    frequency = Counter(word for stems in words.values() for word in stems)
    return {key: sum(1 / frequency[word] for word in stems & _stems(text)) for key, stems in words.items()}


def _stems(text: str) -> set[str]:
    """Return the beginnings of the longer words of a text."""
    return {word[:6] for word in re.findall(r"[a-z]{4,}", text.lower())}
