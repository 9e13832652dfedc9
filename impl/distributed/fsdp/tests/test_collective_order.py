"""Ranks with different collectives raise before they hang, on whatever device the tensors are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.judge.judgement import unavailable
from conformance.ranks import RankFault, RankPool
from conformance.simulator import NAME, Unavailable, ensure_built
from impl.distributed.fsdp._comm.desync.collective_order import CollectiveOrderChecker
from impl.distributed.fsdp._comm.desync.entered_collectives import EnteredCollectives
from impl.distributed.fsdp.tests import accelerator_gloo_cases
from impl.distributed.fsdp.tests.accelerator_gloo_cases import STEPS

CASE = f"{accelerator_gloo_cases.__name__}:train"
TIMEOUT_S = 30.0  # time-out of the group


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    try:
        ensure_built()
    except Unavailable as error:
        unavailable(str(error))
    with RankPool(2, device=NAME, start_s=240, grace_s=TIMEOUT_S) as pool:
        yield pool


@pytest.mark.deadline(300)
def test_ranks_over_gloo_are_told_of_desync_instead_of_hanging_with_accelerator_tensors(
    ranks: RankPool,
) -> None:
    first, second = ranks.run(CASE, deadline_s=120, timeout_s=TIMEOUT_S, parts=False)
    assert first == second
    assert len(first) == STEPS
    began = time.monotonic()
    with pytest.raises(RankFault) as fault:
        ranks.run(CASE, deadline_s=120, timeout_s=TIMEOUT_S, parts=True)
    assert time.monotonic() - began < TIMEOUT_S
    reported = {failure.rank: failure.text for failure in fault.value.scene.failures}
    assert len(reported) == 2
    for text in reported.values():
        assert "Forward order differs across ranks" in text
        assert "gathered 'blocks.1'" in text
        assert "gathered 'blocks.2'" in text


def test_verdict_between_the_check_and_the_collective_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor's thread may find a difference when the collective was already let through."""
    checker, issued = CollectiveOrderChecker(), list[str]()
    monitor: Any = SimpleNamespace(
        verdict="",
        has_settled=False,
        entered=EnteredCollectives(),
        refusal=lambda group: RuntimeError("differ"),
    )

    def note(*args: Any) -> None:
        monitor.verdict = "differ"
        monitor.entered.close()

    monkeypatch.setattr(checker, "_monitor", monitor)
    monkeypatch.setattr(checker, "_blocks_host", lambda *args: True)
    monkeypatch.setattr(checker, "note", note)
    monkeypatch.setattr(monitor, "explain_failure", lambda entry: monitor.verdict, raising=False)
    group: Any = None
    with pytest.raises(RuntimeError, match="differ"):
        checker.exchange(
            "gathered",
            group,
            torch.device("cpu"),
            lambda complete: complete(lambda group: issued.append("it"), group),
        )
    assert not issued
