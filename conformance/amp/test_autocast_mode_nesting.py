"""Nested autocast regions, in threads and left by exceptions: each restores the state from before it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

from conformance.judge.clauses import clause
from conformance.judge.comparing import Compare
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome, observe
from conformance.strategies.regions import LOW, Planned, RegionProgram, operands, programs, state


@clause("amp.autocast_mode.autocast.enabled")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_disabled_region_inside(subject: Library, device: str, dtype: torch.dtype) -> None:
    a, b = operands(device)
    with subject.amp.autocast(device, dtype=dtype):
        low = a @ b
        with subject.amp.autocast(device, enabled=False):
            assert (a @ b).dtype == torch.float32
            with pytest.raises(RuntimeError, match="dtype"):
                _ = low @ b
            with subject.amp.autocast(device, dtype=dtype, enabled=True):
                assert (low @ b).dtype == dtype
        assert (low @ b).dtype == dtype


def trace_of(library: Library, program: RegionProgram) -> Outcome:
    """Return the state at each point of the program, and before and after it."""
    points: list[dict[str, Any]] = [state()]

    def run() -> None:
        with contextlib.suppress(Planned):
            program.run(library, lambda: points.append(state()))
        points.append(state())

    outcome = observe(run)
    return replace(outcome, value=points)


@clause("amp.autocast_mode.autocast.nesting_restores")
@given(program=programs)
def test_nested_regions_match_torch(compare: Compare, program: RegionProgram) -> None:
    """Nest regions, some of them as decorators and some that raise."""
    [outcome] = compare(lambda library: trace_of(library, program))
    assert outcome.value[0] == outcome.value[-1]


@clause("amp.autocast_mode.autocast.nesting_restores")
def test_regions_left_out_of_order(compare: Compare) -> None:
    """Leave regions out of order, as alternating generators do.

    Each exit restores the state from before its region.
    """

    def outcome(library: Library) -> Outcome:
        before = state()
        first = library.amp.autocast("cpu", dtype=torch.bfloat16)
        second = library.amp.autocast("cpu", dtype=torch.float16, cache_enabled=False)
        third = library.amp.autocast("cpu", enabled=False)
        points = []
        for step in (first.__enter__, second.__enter__, third.__enter__):
            step()
            points.append(state())
        for region in (first, third, second):
            region.__exit__(None, None, None)
            points.append(state())
        torch.set_autocast_enabled("cpu", before["enabled"]["cpu"])
        torch.set_autocast_dtype("cpu", before["dtype"]["cpu"])
        torch.set_autocast_cache_enabled(before["cache"])
        return Outcome(points)

    compare(outcome)


@clause("amp.autocast_mode.autocast.nesting_restores")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, StopIteration])
def test_exceptions_leave_region_and_restore_state(
    subject: Library, device: str, error: type[BaseException]
) -> None:
    before = state()
    region = subject.amp.autocast(device, cache_enabled=False)
    with pytest.raises(error), region:
        raise error
    assert state() == before
    region.__enter__()
    assert region.__exit__(ValueError, ValueError(), None) is False
    assert state() == before


@clause("amp.autocast_mode.autocast.one_instance_many_regions")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_instance_can_be_entered_repeatedly(subject: Library, device: str, dtype: torch.dtype) -> None:
    a, b = operands(device)
    before = state()
    region = subject.amp.autocast(device, dtype=dtype)
    for _ in range(3):
        with region:
            assert (a @ b).dtype == dtype
        assert state() == before
    with subject.amp.autocast(device, enabled=False):
        inner = state()
        with region:
            assert (a @ b).dtype == dtype
        assert state() == inner


@clause("amp.autocast_mode.autocast.one_instance_in_itself")
@pytest.mark.deviation("autocast.one_instance_in_itself")
def test_instance_can_be_entered_inside_itself(deviation: DeviationJudge) -> None:
    def probe(library: Library) -> tuple[bool, bool]:
        """Return whether both exits restore the first state, and whether autocast is on between them."""
        before = state()
        region = library.amp.autocast("cpu")
        try:
            with region:
                with region:
                    pass
                between = torch.is_autocast_enabled("cpu")
            return state() == before, between
        finally:
            torch.set_autocast_enabled("cpu", before["enabled"]["cpu"])

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (False, True),
        we_do=lambda outcome: outcome == (True, True),
    )


@clause("amp.autocast_mode.autocast.exit_without_enter")
@pytest.mark.deviation("autocast.exit_without_enter")
@pytest.mark.parametrize("where", ["here", "another thread"])
def test_exit_without_enter_raises(deviation: DeviationJudge, where: str) -> None:
    def probe(library: Library) -> tuple[str, bool]:
        """Return the error of an extra exit, and whether the state of its thread is unchanged."""
        region = library.amp.autocast("cpu", cache_enabled=False)
        outcomes: list[tuple[str, bool]] = []

        def leave() -> None:
            before = state()
            outcome = observe(region.__exit__, None, None, None)
            outcomes.append((str(outcome.raised), state() == before))
            while state()["depth"] < before["depth"]:
                torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(before["cache"])

        with region:
            if where == "another thread":
                thread = threading.Thread(target=leave)
                thread.start()
                thread.join(10)
        if where == "here":
            leave()
        return outcomes[0]

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == ("None", False),
        we_do=lambda outcome: outcome[0].startswith("AttributeError: ") and outcome[1],
    )


@clause("amp.autocast_mode.autocast.bad_arguments")
@pytest.mark.deviation("autocast.failed_enter_changes_nothing")
@pytest.mark.parametrize("attribute", ["_cache_enabled", "fast_dtype"])
def test_failed_enter_restores_state(deviation: DeviationJudge, attribute: str) -> None:
    def probe(library: Library) -> tuple[bool, bool]:
        """Return whether entering raised, and whether the state is as before."""
        before = state()
        region = library.amp.autocast("cpu")
        setattr(region, attribute, "no")
        outcome = observe(region.__enter__)
        is_restored = state() == before
        torch.set_autocast_enabled("cpu", before["enabled"]["cpu"])
        while state()["depth"] > before["depth"]:
            torch.autocast_decrement_nesting()
        return outcome.raised is not None and outcome.raised.kind is TypeError, is_restored

    deviation.judge(
        probe,
        torch_does=lambda outcome: outcome == (True, False),
        we_do=lambda outcome: outcome == (True, True),
    )


@clause("amp.autocast_mode.autocast.threads")
def test_region_does_not_affect_other_threads(subject: Library, device: str) -> None:
    is_enabled: dict[str, Any] = {}

    def elsewhere() -> None:
        is_enabled["outside"] = torch.is_autocast_enabled(device)
        with subject.amp.autocast(device, enabled=False):
            is_enabled["inside"] = torch.is_autocast_enabled(device)
            inside.wait(10)

    inside = threading.Event()
    with subject.amp.autocast(device):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        assert torch.is_autocast_enabled(device)
        inside.set()
        thread.join(10)
        assert torch.is_autocast_enabled(device)
    assert is_enabled == {"outside": False, "inside": False}


@clause("amp.autocast_mode.autocast.threads")
def test_instance_can_be_shared_by_threads(subject: Library, device: str) -> None:
    """A decorated function is one instance that many threads call."""
    a, b = operands(device)
    decorated = subject.amp.autocast(device, dtype=torch.bfloat16)(torch.mm)
    dtypes: list[torch.dtype] = []
    threads = [threading.Thread(target=lambda: dtypes.append(decorated(a, b).dtype)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert dtypes == [torch.bfloat16] * 4
