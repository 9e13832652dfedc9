"""Runs a training on ranks over torch and on ranks over the subject, and compares what they return."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from conformance.judge.library import Library
from conformance.judge.outcome import assert_same_outcome, observe
from conformance.judge.tolerances import TRAINED, Tolerance
from conformance.ranks import RankPool

_IMPORTS_S, _CASE_S = 400.0, 120.0


class Sides:
    """Runs cases on ranks of the reference and of the subject. `pools` of ranks, by library, outlast a test."""

    def __init__(self, pools: dict[str, RankPool], reference: Library, subject: Library) -> None:
        self._pools, self.reference, self.subject = pools, reference, subject

    def run(self, library: Library, case: str, **arguments: Any) -> list[Any]:
        """Run `module:function` of this package over `library`. Return the result of each rank."""
        if library.spec not in self._pools:
            warm_up = ("conformance.clients.taking_place:take_place", {"library": library.spec})
            turns = os.environ.get("PYTEST_XDIST_TESTRUNUID")
            self._pools[library.spec] = RankPool(2, warm_up=warm_up, start_s=_IMPORTS_S, turns=turns)
        return self._pools[library.spec].run(f"conformance.clients.{case}", deadline_s=_CASE_S, **arguments)

    def assert_alike(
        self, case: str, folder: Path | None = None, tolerance: Tolerance = TRAINED, **arguments: Any
    ) -> list[Any]:
        """Fail unless every rank returns the same on both sides. Each side writes to its own folder."""
        returned = []
        for side, library in {"torch": self.reference, "subject": self.subject}.items():
            own = {} if folder is None else {"folder": tempfile.mkdtemp(prefix=side, dir=folder)}
            returned.append(self.run(library, case, **own, **arguments))
        assert_same(*returned, tolerance)
        return returned[1]


def assert_same(expected: list[Any], actual: list[Any], tolerance: Tolerance = TRAINED) -> None:
    for expected_rank, actual_rank in zip(expected, actual, strict=True):
        assert_same_outcome(
            observe(lambda value=expected_rank: value), observe(lambda value=actual_rank: value), tolerance
        )
