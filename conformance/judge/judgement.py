"""What became of a test: its outcome, and all that is told with it.

Outcomes: passed, failed, hang, crash, not provided, unavailable (device, world size or compiler), known (the subject
takes torch's side of a deviation), reference cannot run here (a row of `reference_limits.toml`, seen to hold), not
claimed (an extension), stale (a row that torch has outgrown, or an expectation that no longer holds), expected (red, as
the subject's claims file says). Red are failed, hang, crash, stale, and not provided for whatever the subject claims.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest

from conformance.judge import clauses
from conformance.judge.claims import NotClaimed, claimed_extensions, is_claimed
from conformance.judge.deviations import StaleRow
from conformance.judge.errors import describe
from conformance.judge.expectations import CAN_BE_EXPECTED, Expectations, forgiven
from conformance.judge.heading import replay_command
from conformance.judge.library import NotProvided, load_library
from conformance.judge.reference_limits import ReferenceCannot
from conformance.judge.rows import all_reference_limits
from conformance.judge.tolerances import take_margins

RED = ("failed", "hang", "crash", "stale")
_MOST_TEXT = 4000
_AXES = ("device", "dtype", "world_size")


@dataclass
class Judgement:
    """What became of one test. `clause` is empty for a test of this repository's own parts."""

    nodeid: str
    outcome: str
    seconds: float
    clause: str = ""
    device: str = ""
    dtype: str = ""
    world_size: str = ""
    deviation: str = ""
    reason: str = ""
    replay: str = ""
    margins: dict[str, float] = field(default_factory=dict)
    draws: bool = False  # its examples or its data, so that another run tries others

    @property
    def is_red(self) -> bool:
        return self.outcome in RED


def unavailable(reason: str) -> None:
    """End the test: what it needs (a device, a world size, a compiler) is not on this machine."""
    pytest.skip(f"unavailable: {reason}")


def judgement_of(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> Judgement:
    clause = clauses.clause_of(item)
    deviation = getattr(item, "deviation_judge", None)
    outcome, reason = _classify(item, call, report)
    limit = item.get_closest_marker("reference_limit")
    if outcome == "passed" and limit is not None and all_reference_limits()[limit.args[0]].is_of_this_torch:
        outcome = "reference cannot run here"
    if outcome == "passed" and deviation is not None and deviation.subject_takes_torchs_side:
        outcome = "known"
    outcome, reason = if_expected(item.config, item.nodeid, clause, (outcome, reason), report)
    return Judgement(
        nodeid=item.nodeid,
        outcome=outcome,
        seconds=round(call.duration, 4),
        clause=clause,
        deviation=deviation.row.id if deviation else "",
        reason=reason,
        replay=replay_command(item.config.option, item.nodeid) if outcome in (*RED, "expected") else "",
        margins=take_margins(),
        draws=item.config.option.seed is not None
        or hypothesis.is_hypothesis_test(getattr(item, "obj", None)),
        **_axes(item),
    )


def if_expected(
    config: pytest.Config, nodeid: str, clause: str, found: tuple[str, str], report: pytest.TestReport
) -> tuple[str, str]:
    """Outcome and reason: those that were found, unless the subject's claims file expects the failure."""
    row = Expectations.of(config).find(nodeid, clause) if found[0] in CAN_BE_EXPECTED else None
    if row is None:
        return found
    report.outcome = "skipped"
    report.wasxfail = forgiven(row)  # pyright: ignore[reportAttributeAccessIssue] as pytest itself does
    return "expected", f"{forgiven(row)}\n{found[1]}"


def _axes(item: pytest.Item) -> dict[str, str]:
    """Where a test ran, by its parameters, or by the ranks that it asked for if they were of one kind."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    axes = {axis: str(params[axis]).removeprefix("torch.") for axis in _AXES if axis in params}
    pools = getattr(item, "pools_asked", ())
    if len(pools) == 1:
        ((world_size, device),) = pools
        axes = {"device": device, "world_size": str(world_size)} | axes
    return axes


def _classify(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> tuple[str, str]:
    if call.excinfo is None:
        return "passed", ""
    error = call.excinfo.value
    text = describe(error)[:_MOST_TEXT]
    if isinstance(error, NotProvided):
        lacking = error.path
        subject = load_library(item.config.option.subject)
        is_extension = clauses.clause_of(item) in claimed_extensions(subject.spec)
        if not is_claimed(subject, lacking) and not is_extension:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), None, f"not provided: {lacking}")
            return "not provided", f"{subject.spec} does not provide {lacking}"
        return "failed", f"not provided, though claimed: {lacking}"
    if isinstance(error, NotClaimed):
        return "not claimed", str(error)
    if isinstance(error, ReferenceCannot):
        return "reference cannot run here", str(error)
    if report.outcome == "skipped":
        return "unavailable", str(getattr(error, "msg", error)).removeprefix("unavailable: ")
    return _KINDS.get(type(error).__name__, "failed"), text


_KINDS = {"Hang": "hang", "RankHung": "hang", "RankDied": "crash", StaleRow.__name__: "stale"}
