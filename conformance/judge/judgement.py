"""The judgement of a test: its outcome, and what the report shows with it.

Outcomes:
    passed, failed, hang, crash
    not provided                 the subject lacks a name. If it claims the name, the outcome is failed
    unavailable                  this machine lacks a device, ranks or a compiler
    known                        the subject does what torch does, where Tandem deviates
    reference cannot run here    an entry of `reference_limits.toml` was confirmed
    stale                        torch no longer behaves as an entry says, or an expectation no longer holds
    expected                     the test failed, as the subject's claims file says
    flaky                        runs with the same seed had different outcomes (`--rerun`)
Failed, hang, crash, stale and flaky are red. Clauses without tests have outcomes as well (`judge.accounting`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest

from conformance.judge import clauses
from conformance.judge.deviations import StaleDeviation
from conformance.judge.errors import describe
from conformance.judge.files.claims import claimed_extensions, is_claimed
from conformance.judge.files.expectations import CAN_BE_EXPECTED, Expectations, expected_failure_text
from conformance.judge.files.reference_limits import ReferenceCannot
from conformance.judge.files.rows import all_reference_limits
from conformance.judge.heading import replay_command
from conformance.judge.library import NotProvided, load_library
from conformance.judge.tolerances import take_margins

FLAKY = "flaky"
RED = ("failed", "hang", "crash", "stale", FLAKY)
_MOST_TEXT = 4000
_AXES = ("device", "dtype", "world_size")


@dataclass
class Judgement:
    """The result of one test. `clause` is empty for a test of this repository."""

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
    draws: bool = False  # whether another run may try other examples or data

    @property
    def is_red(self) -> bool:
        return self.outcome in RED


def unavailable(reason: str) -> None:
    """Skip the test, because this machine lacks a device, a world size or a compiler that it needs."""
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
    config: pytest.Config, nodeid: str, clause: str, result: tuple[str, str], report: pytest.TestReport
) -> tuple[str, str]:
    """Return outcome and reason: `result`, or "expected" if the subject's claims file expects the failure."""
    outcome, reason = result
    row = Expectations.of_run(config).find(nodeid, clause) if outcome in CAN_BE_EXPECTED else None
    if row is None:
        return result
    text = expected_failure_text(row)
    report.outcome = "skipped"
    report.wasxfail = text  # pyright: ignore[reportAttributeAccessIssue] as pytest itself does
    return "expected", f"{text}\n{reason}"


def _axes(item: pytest.Item) -> dict[str, str]:
    """Return device, dtype and world size of a test, from its parameters or its only pool of ranks."""
    params = clauses.parameters_of(item)
    axes = {axis: str(params[axis]).removeprefix("torch.") for axis in _AXES if axis in params}
    pools = getattr(item, "used_pools", ())
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
        missing = error.path
        subject = load_library(item.config.option.subject)
        is_extension = clauses.clause_of(item) in claimed_extensions(subject.spec)
        if not is_claimed(subject, missing) and not is_extension:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), None, f"not provided: {missing}")
            return "not provided", f"{subject.spec} does not provide {missing}"
        return "failed", f"not provided, though claimed: {missing}"
    if isinstance(error, ReferenceCannot):
        return "reference cannot run here", str(error)
    if report.outcome == "skipped":
        return "unavailable", str(getattr(error, "msg", error)).removeprefix("unavailable: ")
    return _KINDS.get(type(error).__name__, "failed"), text


_KINDS = {"Hang": "hang", "RankHung": "hang", "RankDied": "crash", StaleDeviation.__name__: "stale"}
