"""Where `impl` leaves torch's behaviour on purpose: rows of `deviations.toml`, asserted on both sides.

A row goes stale loudly: once torch behaves differently, its test fails until the row ends with the version that fixed
it. From that version on, torch and the subject must both do what is right. A subject other than `impl` may take either
side, and no third one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, differences
from conformance.judge.rows import Deviation
from conformance.judge.surface import torch_version
from conformance.judge.tolerances import TRAINED
from conformance.ranks import RankFault


class StaleRow(AssertionError):
    """torch does not do what a row of `deviations.toml` or `reference_limits.toml` says of this version."""


class DeviationJudge:
    """Runs one probe on both libraries and says which side of a row the subject takes."""

    def __init__(
        self,
        subject: Library,
        reference: Library,
        row: Deviation,
        is_promised: bool = False,
        device: str | None = None,
    ) -> None:
        """`is_promised` if the subject may not take torch's side, as an extension that it claims; `impl` never may.

        On a device that the row does not name, no subject promises our side, and the row cannot go stale. On a torch
        outside the row's range, torch is held to be right.
        """
        self.subject, self.reference, self.row = subject, reference, row
        self._is_fixed = row.holds_on(device) and not row.is_of_this_torch
        self._holds_here = row.holds_on(device) and row.is_of_this_torch
        self._is_promised = self._holds_here and (is_promised or subject.package == "impl")
        self.subject_takes_torchs_side = False

    def judge(
        self,
        probe: Callable[[Library], Any],
        *,
        we_do: Callable[[Any], bool],
        torch_does: Callable[[Any], bool] | None = None,
        may_agree: bool = False,
    ) -> None:
        """`probe(library)` returns what was seen; the two predicates recognise our side and torch's.

        Without `torch_does` it is what torch is seen to do here, as `does_as` tells. With `may_agree` torch may do what
        we do, and then every subject must: a world of one shards nothing, and so knows few of torch's faults.
        On a device that the row does not name, torch may do anything, and the subject does the same or what we do.
        On a torch outside the row's range, torch must have left its side. Every subject must then do what torch does
        or what we do.
        """
        seen = probe(self.reference)
        torch_does_too = (may_agree or self._is_fixed) and we_do(seen)
        is_known = torch_does(seen) if torch_does else not we_do(seen)
        if self._is_fixed and is_known and not torch_does_too:
            raise StaleRow(
                f"row {self.row.id} of deviations.toml is of torch {self.row.torch}, but torch {torch_version()} "
                f"does so too: {seen!r}"
            )
        if self._holds_here and not is_known and not torch_does_too:
            sides = "what we do" if we_do(seen) else "a third thing"
            raise StaleRow(f"row {self.row.id} of deviations.toml is stale: torch now does {sides}: {seen!r}")
        actual = probe(self.subject)
        if we_do(actual):
            return
        assert not torch_does_too, f"torch does so too here ({self.row.we_do}); got {actual!r}"
        is_torchs = torch_does(actual) if torch_does and is_known else does_as(seen, actual)
        assert is_torchs, f"neither torch's side nor ours ({self.row.we_do}): {actual!r}; torch: {seen!r}"
        assert not self._is_promised, f"promised: {self.row.we_do}; got torch's side: {actual!r}"
        self.subject_takes_torchs_side = not self._is_fixed


def does_as(expected: Any, actual: Any) -> bool:
    """Whether all that was seen is the same, within the roundings of a training.

    Of what was raised the type alone: torch's words about its own insides would fit no other's.
    """
    if isinstance(expected, Outcome) and isinstance(actual, Outcome):
        if expected.raised is None or actual.raised is None:
            return expected.raised is actual.raised and does_as(expected.value, actual.value)
        return issubclass(actual.raised.kind, expected.raised.kind)
    if isinstance(expected, RankFault):
        return type(expected) is type(actual)
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(does_as, expected, actual))
    return not any(differences(Outcome(expected), Outcome(actual), TRAINED))
