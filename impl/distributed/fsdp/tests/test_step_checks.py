"""Checks before optimizer steps, which sharding registers for every optimizer of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from impl.distributed.fsdp import fully_shard
from impl.optim._fused_updates import has_fused_update


@pytest.fixture(autouse=True)
def _group_without_peers() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_checks_of_sharding_leave_fused_updates_possible() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    plain = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    assert has_fused_update(torch.optim.AdamW(model.parameters()))
    assert has_fused_update(plain)
    hook = register_optimizer_step_pre_hook(lambda *_: None)
    assert not has_fused_update(plain)
    hook.remove()
    assert has_fused_update(plain)
