"""Ranks with different collectives raise before they hang, on whatever device the tensors are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.distributed.fsdp.scenes.desync_programs import wait_until_raised
from conformance.ranks import Rank, RankFault, RankPool
from conformance.ranks.fixtures import require_simulator
from conformance.simulator import NAME
from impl.distributed.fsdp import FullyShardedDataParallel
from impl.distributed.fsdp._comm.desync.collective_order import CollectiveOrderChecker
from impl.distributed.fsdp._comm.desync.entered_collectives import EnteredCollectives
from impl.distributed.fsdp.wrap import ModuleWrapPolicy

TIMEOUT_S = 30.0  # time-out of the group


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    require_simulator()
    with RankPool(2, device=NAME, start_s=240, grace_s=TIMEOUT_S) as pool:
        yield pool


BLOCKS = 3


STEPS = 3


ASTRAY = 1  # the rank that leaves out a block in the last step


class _HostWork:
    """Collective of gloo on the host. Waiting for it copies the result to the accelerator."""

    def __init__(self, work: dist.Work, output: Tensor, result: Tensor) -> None:
        self._work = work
        self._output = output
        self._result = result

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, *timeout: timedelta) -> bool:
        self._work.wait(*timeout)
        self._output.copy_(self._result)
        return True


class AcceleratorGloo(dist.ProcessGroup):
    """gloo as it serves CUDA tensors: the host copies them, runs the collective and copies the result back.

    torch's gloo refuses tensors of the simulated accelerator.
    """

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        super().__init__(gloo.rank(), gloo.size())  # pyright: ignore[reportCallIssue]
        self._gloo: Any = gloo

    def rank(self) -> int:
        return self._gloo.rank()

    def size(self) -> int:
        return self._gloo.size()

    def get_group_store(self) -> Any:
        return self._gloo.get_group_store()

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo._get_backend(torch.device("cpu"))

    def all_gather_single(self, output: Tensor, shard: Tensor) -> Any:
        result = torch.empty(output.shape, dtype=output.dtype)
        return _HostWork(self._gloo._allgather_base(result, shard.cpu()), output, result)

    def reduce_scatter_single(self, shard: Tensor, buffer: Tensor) -> Any:
        result = torch.empty(shard.shape, dtype=shard.dtype)
        return _HostWork(self._gloo._reduce_scatter_base(result, buffer.cpu()), shard, result)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(BLOCKS))
        self.run = [*range(BLOCKS)]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.run:
            x = self.blocks[index](x)
        return x


def train(rank: Rank, *, timeout_s: float, parts: bool) -> list[float]:
    """Return the losses of all steps. With `parts` one rank leaves out a block in the last step."""
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(gloo, dist.ProcessGroup)
    torch.manual_seed(0)
    blocks = _Blocks()
    model = FullyShardedDataParallel(
        blocks,
        process_group=AcceleratorGloo(gloo),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        device_id=rank.device,
        use_orig_params=True,
    )
    losses: list[float] = []
    try:
        for step in range(STEPS):
            if parts and rank.rank == ASTRAY and step == STEPS - 1:
                blocks.run.remove(1)
            loss = model(torch.ones(2, 4, device=rank.device)).square().sum()
            loss.backward()
            losses.append(float(loss))
    except RuntimeError:
        wait_until_raised(rank.world_size)
        raise
    return losses


@pytest.mark.deadline(300)
def test_ranks_over_gloo_are_told_of_desync_instead_of_hanging_with_accelerator_tensors(
    ranks: RankPool,
) -> None:
    first, second = ranks.run(train, deadline_s=120, timeout_s=TIMEOUT_S, parts=False)
    assert first == second
    assert len(first) == STEPS
    began = time.monotonic()
    with pytest.raises(RankFault) as fault:
        ranks.run(train, deadline_s=120, timeout_s=TIMEOUT_S, parts=True)
    assert time.monotonic() - began < TIMEOUT_S
    reported = {failure.rank: failure.text for failure in fault.value.record.failures}
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
        has_completed_pending=False,
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
