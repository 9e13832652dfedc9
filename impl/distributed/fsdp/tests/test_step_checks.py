"""Checks before optimizer steps, which sharding registers for every optimizer of the process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook

from conformance.strategies.user_optimizers import CountingOnDevices
from impl.distributed.fsdp import fully_shard
from impl.optim._fused_updates import has_fused_update

pytestmark = pytest.mark.usefixtures("fake_group")


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


def test_unsynchronised_gradients_leave_fused_updates_possible() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    plain = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    assert has_fused_update(plain)
    with pytest.raises(RuntimeError, match="wait to be synchronised"):
        torch.optim.SGD(model.parameters()).step()
    # End the check of this model, which breaks the graphs of compiled steps.
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2)).sum().backward()


def test_checks_of_sharding_leave_compiled_steps_recognised() -> None:
    fully_shard(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    torch._dynamo.reset()
    with FakeTensorMode():
        param = nn.Parameter(torch.ones(2, device="cuda"))
        param.grad = torch.ones_like(param)
        optimizer = CountingOnDevices([param])
        torch.compile(optimizer.step, backend="eager")()
    # Dynamo makes steps capturable if it recognises the optimizer. Their counts are on the device then.
    assert optimizer.state[param]["step"].device.type == "cuda"
