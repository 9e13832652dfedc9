"""Where `impl` leaves torch's behaviour on purpose: rows of `deviations.toml`, asserted on both sides.

A row goes stale loudly: once torch behaves differently, its test fails until the row is taken out. A subject other
than `impl` may take either side.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports the faults, which read the clauses, which read the rows
    from conformance.library import Library


@dataclass(frozen=True)
class Deviation:
    id: str
    clause: str
    torch_does: str
    we_do: str
    why: str
    thread: str


@dataclass(frozen=True)
class ReferenceLimit:
    """Something that torch cannot do on some devices: a row of `reference_limits.toml`."""

    id: str
    clauses: tuple[str, ...]  # whose tests meet it
    devices: tuple[str, ...]
    torch_does: str
    error: str  # a pattern, found in how such a test fails
    thread: str


class StaleRow(AssertionError):
    """torch no longer does what a row of `deviations.toml` or `reference_limits.toml` says."""


@functools.cache
def all_reference_limits() -> Mapping[str, ReferenceLimit]:
    rows = tomllib.loads(Path(__file__).with_name("reference_limits.toml").read_text())
    return {
        row_id: ReferenceLimit(id=row_id, **row | {key: tuple(row[key]) for key in ("clauses", "devices")})
        for row_id, row in rows.items()
    }


@functools.cache
def all_deviations() -> Mapping[str, Deviation]:
    rows = tomllib.loads(Path(__file__).with_name("deviations.toml").read_text())
    return {row_id: Deviation(id=row_id, **row) for row_id, row in rows.items()}


class DeviationJudge:
    """Runs one probe on both libraries and says which side of a row the subject takes."""

    def __init__(
        self, subject: Library, reference: Library, row: Deviation, is_promised: bool = False
    ) -> None:
        """`is_promised` if the subject may not take torch's side, as an extension that it claims; `impl` never may."""
        self.subject, self.reference, self.row = subject, reference, row
        self._is_promised = is_promised or subject.package == "impl"
        self.subject_takes_torchs_side = False

    def judge(
        self,
        probe: Callable[[Library], Any],
        *,
        torch_does: Callable[[Any], bool],
        we_do: Callable[[Any], bool],
        may_agree: bool = False,
    ) -> None:
        """`probe(library)` returns what was seen; the two predicates recognise torch's side and ours.

        With `may_agree` torch may do what we do, and then every subject must: a world of one shards nothing, and so
        knows few of torch's faults.
        """
        seen = probe(self.reference)
        torch_does_too = may_agree and we_do(seen)
        if not torch_does(seen) and not torch_does_too:
            sides = "what we do" if we_do(seen) else "a third thing"
            raise StaleRow(f"row {self.row.id} of deviations.toml is stale: torch now does {sides}: {seen!r}")
        got = probe(self.subject)
        if we_do(got):
            return
        assert not torch_does_too, f"torch does so too here ({self.row.we_do}); got {got!r}"
        assert torch_does(got), f"neither torch's side nor ours ({self.row.we_do}): {got!r}"
        assert not self._is_promised, f"promised: {self.row.we_do}; got torch's side: {got!r}"
        self.subject_takes_torchs_side = True
