"""Tests of deviations, in which `impl` differs from torch on purpose: what torch does and what Tandem does.

A deviation does not go stale unnoticed. Once torch behaves differently, its test fails until the deviation names the
version that fixed it. From that version on, torch and the subject must both do the right thing. A subject other than
`impl` may do what torch does or what Tandem does, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.judge.files.rows import Deviation
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, differences
from conformance.judge.rank_errors import RankDied, RankFault
from conformance.judge.surface import torch_version
from conformance.judge.tolerances import TRAINED


class StaleDeviation(AssertionError):
    """Raised if torch does not do what `deviations.toml` or `reference_limits.toml` says about this version."""


class DeviationJudge:
    """Judge of one deviation: runs a probe on both libraries and records whether the subject does what torch does."""

    def __init__(
        self,
        subject: Library,
        reference: Library,
        row: Deviation,
        is_promised: bool = False,
        device: str | None = None,
        asks_torch: bool = True,
    ) -> None:
        """Create the judge of `row`.

        On a device that the deviation does not name, no subject has to do what Tandem does, and the deviation cannot
        be stale. With a torch version outside its range, torch must do the right thing.

        Args:
            is_promised: the subject may not do what torch does, because it claims an extension. Always true for `impl`.
            device: the device type that the test runs on. None if the test names no device.
            asks_torch: torch runs the probe even if the subject does what Tandem does. Always true for torch itself.
        """
        self.subject, self.reference, self.row = subject, reference, row
        self._is_fixed = row.holds_on(device) and not row.is_of_this_torch
        self._holds_here = row.holds_on(device) and row.is_of_this_torch
        self._is_promised = self._holds_here and (is_promised or subject.package == "impl")
        self._asks_torch = asks_torch or subject.spec == reference.spec
        self.subject_takes_torchs_side = False

    def judge(
        self,
        probe: Callable[[Library], Any],
        *,
        we_do: Callable[[Any], bool],
        torch_does: Callable[[Any], bool] | None = None,
        may_agree: bool = False,
    ) -> None:
        """Run `probe` on both libraries and fail unless the subject does what torch does or what Tandem does.

        On a device that the deviation does not name, torch may do anything, and the subject must do the same or what
        Tandem does. With a torch version outside the deviation's range, torch must no longer do what it did. Every
        subject must then do what torch does or what Tandem does.

        Args:
            probe: called with a library. Its result is passed to the predicates.
            we_do: whether a result is what Tandem does.
            torch_does: whether a result is what torch does. Without it, torch's own result is compared by `does_as`.
            may_agree: torch may do what Tandem does, and then every subject must. For example, few of torch's faults
                show in a world of one rank, which shards nothing.
        """
        actual = None
        if not self._asks_torch and we_do(actual := probe(self.subject)):
            return
        expected = probe(self.reference)
        torch_agrees = (may_agree or self._is_fixed) and we_do(expected)
        is_known = torch_does(expected) if torch_does else not we_do(expected)
        if self._is_fixed and is_known and not torch_agrees:
            raise StaleDeviation(
                f"the deviation {self.row.id} is limited to torch {self.row.torch}, but torch {torch_version()} "
                f"behaves so too: {expected!r}"
            )
        if self._holds_here and not is_known and not torch_agrees:
            side = "what Tandem does" if we_do(expected) else "something else"
            raise StaleDeviation(f"the deviation {self.row.id} is stale: torch now does {side}: {expected!r}")
        if self._asks_torch:
            actual = probe(self.subject)
            if we_do(actual):
                return
        assert not torch_agrees, f"torch does the right thing here too ({self.row.we_do}); got {actual!r}"
        is_torchs = torch_does(actual) if torch_does and is_known else does_as(expected, actual)
        assert is_torchs, (
            f"got {actual!r}, expected what Tandem does ({self.row.we_do}) or what torch does: {expected!r}"
        )
        assert not self._is_promised, f"got what torch does: {actual!r}; expected: {self.row.we_do}"
        self.subject_takes_torchs_side = not self._is_fixed


def does_as(expected: Any, actual: Any) -> bool:
    """Return whether two results are equal within the tolerance of a training.

    Of exceptions only the types are compared, because torch's texts about its internals fit no other library.
    """
    if isinstance(expected, Outcome) and isinstance(actual, Outcome):
        if expected.raised is None or actual.raised is None:
            return expected.raised is actual.raised and does_as(expected.value, actual.value)
        return issubclass(actual.raised.kind, expected.raised.kind)
    if isinstance(expected, RankDied) or isinstance(actual, RankDied):
        # A process that dies has used freed memory. The next run of the same program may raise instead.
        return _has_failed(expected) and _has_failed(actual)
    if isinstance(expected, RankFault):
        return type(expected) is type(actual)
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(does_as, expected, actual))
    return not any(differences(Outcome(expected), Outcome(actual), TRAINED))


def _has_failed(result: Any) -> bool:
    """Return whether a case failed on its ranks, or every rank's outcome is an exception."""
    if isinstance(result, list):
        return all(isinstance(outcome, Outcome) and outcome.raised is not None for outcome in result)
    return isinstance(result, RankFault)
