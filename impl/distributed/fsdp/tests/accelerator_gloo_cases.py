"""Ranks that train on an accelerator in a group over gloo, whose collectives block the host, as cases of a pool."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.distributed.fsdp.desync_programs import wait_until_raised
from conformance.ranks import Rank
from impl.distributed.fsdp import FullyShardedDataParallel
from impl.distributed.fsdp.wrap import ModuleWrapPolicy

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
