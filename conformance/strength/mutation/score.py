"""Score of a sample of mutants, with its confidence interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from conformance.strength.results import EQUIVALENT, KILLED, SURVIVED, UNREACHED

# Limit for the share of reached mutants with equivalence notes, above which the score depends too much on notes.
MOST_EQUIVALENT = 0.1
_Z = 1.959964  # quantile of the normal distribution for 95%


@dataclass(frozen=True)
class Score:
    killed: int
    counted: int  # killed mutants and survivors
    unreached: int
    equivalent: int

    @classmethod
    def of(cls, results: Sequence[str]) -> Score:
        count = Counter(results)
        counted = count[KILLED] + count[SURVIVED]
        return cls(count[KILLED], counted, count[UNREACHED], count[EQUIVALENT])

    @property
    def depends_on_notes(self) -> bool:
        return self.equivalent > MOST_EQUIVALENT * (self.counted + self.equivalent)

    def __str__(self) -> str:
        left_out = f"{self.unreached} unreached, {self.equivalent} equivalent"
        if not self.counted:
            return f"nothing to count ({left_out})"
        low, high = _wilson(self.killed, self.counted)
        share = self.killed / self.counted
        return f"{share:.1%} [{low:.1%}, {high:.1%}], {self.killed} of {self.counted} ({left_out})"


def _wilson(hits: int, tries: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share, which is also valid for few tries and for shares near 1."""
    share, square = hits / tries, _Z * _Z
    middle = (share + square / (2 * tries)) / (1 + square / tries)
    half = _Z / (1 + square / tries) * math.sqrt(share * (1 - share) / tries + square / (4 * tries * tries))
    return max(0.0, middle - half), min(1.0, middle + half)
