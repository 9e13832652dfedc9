"""Gathers that raise, by a rank's part as a case of a pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from conformance.ranks import Rank
from impl.distributed.fsdp import fully_shard


class FailsOnce:
    """Gathers, but where it `fails`."""

    fails = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        fails, self.fails = self.fails, False
        if fails:
            raise OSError("a gather fails")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, **options)


def gather_again(rank: Rank) -> list[float]:
    """Return outputs of a layer of ones that keeps shards after forward, once it was written to and a gather fails."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    mesh = DeviceMesh("cpu", torch.arange(rank.world_size))
    fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    model = fully_shard(nn.Sequential(layer), mesh=mesh)
    gathers = FailsOnce()
    layer.set_custom_all_gather(gathers)
    shards = list(model.parameters())
    with torch.no_grad():
        before = model(torch.ones(1, 4))
        for shard in shards:
            shard.mul_(2)
        gathers.fails = True
        with pytest.raises(OSError, match="a gather fails"):
            model(torch.ones(1, 4))
        return [float(element) for out in (before, model(torch.ones(1, 4))) for element in out.unique()]
