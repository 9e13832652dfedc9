"""Order in which units ran, which predicts the next one for prefetching."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

_Unit = TypeVar("_Unit")
_LONG = 10_000  # forwards of units in a long iteration


class Order(Generic[_Unit]):
    """The units of one iteration, in the order of their forwards, and the previous iteration, which predicts it."""

    def __init__(self) -> None:
        self._previous: list[_Unit] = []  # forwards of the previous iteration
        # The unit whose forward followed, for units that ran once in the previous iteration.
        self._follower: dict[_Unit, _Unit] = {}
        self._begun: list[_Unit] = []
        self._ended: list[_Unit] = []
        self._place_of_end: dict[_Unit, int] = {}

    @property
    def is_long(self) -> bool:
        """Whether there were so many forwards without a backward that none may come."""
        return len(self._begun) > _LONG

    def begin_forward(self, unit: _Unit) -> None:
        self._begun.append(unit)

    def end_forward(self, unit: _Unit) -> None:
        self._place_of_end.setdefault(unit, len(self._ended))
        self._ended.append(unit)

    def next_in_forward(self, unit: _Unit) -> _Unit | None:
        """Return the unit whose forward came next in the previous iteration, or None.

        There is none at the iteration's end and in the first iteration.
        """
        place = len(self._begun) - 1
        if self._previous[place : place + 1] == [unit]:
            return next(iter(self._previous[place + 1 : place + 2]), None)
        return self._follower.get(unit)

    def next_in_backward(self, unit: _Unit) -> _Unit | None:
        """Return the unit whose forward ended just before that of `unit`, because backward runs in reverse order."""
        place = self._place_of_end.get(unit, 0)
        return self._ended[place - 1] if place > 0 else None

    def next_iteration(self) -> None:
        if self._begun:
            pairs = zip(self._begun, self._begun[1:], strict=False)
            times = Counter(self._begun)
            self._follower = {unit: after for unit, after in pairs if times[unit] == 1}
            self._previous = self._begun
        self._begun = []
        self._ended = []
        self._place_of_end = {}
