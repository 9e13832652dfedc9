"""Checks before optimizer steps, which sharding registers for every optimizer of the process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from conformance.strategies.user_optimizers import CountingOnDevices, Plain
from impl.amp import GradScaler, autocast
from impl.distributed.fsdp import FullyShardedDataParallel, fully_shard
from impl.distributed.fsdp._engine.optimizer_writes import track_optimizer_writes
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


class Unit:
    """The gradients of a unit, which counts how often a step asks for them."""

    questions = 0

    def have_gradients(self) -> bool:
        self.questions += 1
        return True


def test_step_asks_each_unit_once_about_ranks_without_elements() -> None:
    """The answer reads all parameters of the unit, and with many ranks most parameters have no elements."""
    unit, parameters = Unit(), [nn.Parameter(torch.ones(0)) for _ in range(3)]
    track_optimizer_writes(parameters, unit.have_gradients)
    before = [parameter._version for parameter in parameters]
    torch.optim.SGD(parameters).step()
    assert unit.questions == 1
    assert all(parameter._version > version for parameter, version in zip(parameters, before, strict=True))


@pytest.mark.parametrize("method", ["step", "fused_step"])
def test_scaler_names_cause_of_missing_gradients(method: str) -> None:
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters()), GradScaler("cpu")
    fully_shard(model)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(RuntimeError, match="steps weight, bias as they were before sharding"):
        getattr(scaler, method)(optimizer)


def test_unsynchronised_gradients_leave_fused_updates_possible() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    param = nn.Parameter(torch.ones(1))
    plain, scaler = torch.optim.AdamW([param]), GradScaler("cpu", init_scale=1.0)
    assert has_fused_update(plain)
    scaler.scale(param.sum()).backward()
    scaler.fused_step(plain)
    assert scaler.explain(plain).is_fused
    sharded = torch.optim.SGD(model.parameters())
    for step in (sharded.step, lambda: scaler.fused_step(sharded)):
        with pytest.raises(RuntimeError, match="wait to be synchronised"):
            step()


@pytest.mark.parametrize("waits", [False, True])
def test_checks_of_sharding_leave_compiled_steps_recognised(waits: bool) -> None:
    model = fully_shard(nn.Linear(2, 2))
    model.set_requires_gradient_sync(not waits)
    model(torch.ones(1, 2)).sum().backward()
    # The check of unsynchronised gradients ends with their model.
    del model
    gc.collect()
    torch._dynamo.reset()
    with FakeTensorMode():
        param = nn.Parameter(torch.ones(2, device="cuda"))
        param.grad = torch.ones_like(param)
        optimizer = CountingOnDevices([param])
        torch.compile(optimizer.step, backend="eager")()
    # Dynamo makes steps capturable if it recognises the optimizer. Their counts are on the device then.
    assert optimizer.state[param]["step"].device.type == "cuda"


@pytest.mark.parametrize("use", [fully_shard, autocast("cpu")])
def test_compiled_steps_stay_one_graph_after_sharding_and_autocast(use: Any) -> None:
    use(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    torch._dynamo.reset()
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones_like(param)
    torch.compile(Plain([param], lr=0.5).step, backend="eager", fullgraph=True)()
    assert param.tolist() == [0.5, 0.5]


@contextmanager
def export_in_another_thread() -> Generator[None]:
    """Context manager inside of which another thread exports a module."""
    started, ended = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, tensor: Tensor) -> Tensor:
            started.set()
            ended.wait()
            return tensor + 1.0

    thread = threading.Thread(target=torch.export.export, args=(Waiting(), (torch.ones(2),)))
    thread.start()
    started.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_steps_beside_export_are_checked() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model)(torch.ones(1, 2)).sum().backward()
    with export_in_another_thread(), pytest.raises(RuntimeError, match="as they were before sharding"):
        optimizer.step()


def test_steps_beside_export_clear_casts_of_autocast() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    with export_in_another_thread(), autocast("cpu"):
        before = layer(torch.ones(1, 2))
        before.float().sum().backward()
        optimizer.step()
        assert not torch.equal(layer(torch.ones(1, 2)), before)


def loaded_from_unsharded(model: nn.Module, kind: Any, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of a sharded model, with the states of an optimizer of the unsharded one."""
    unsharded = [nn.Parameter(torch.ones(param.shape)) for param in model.parameters()]
    earlier = kind(unsharded, **options)
    for param in unsharded:
        param.grad = torch.ones_like(param)
    earlier.step()
    optimizer = kind(model.parameters(), **options)
    optimizer.load_state_dict(earlier.state_dict())
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [
        (torch.optim.AdamW, {}, "exp_avg, exp_avg_sq"),
        (torch.optim.AdamW, {"fused": True}, "exp_avg, exp_avg_sq"),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": False}, "momentum_buffer"),
        (torch.optim.Adagrad, {}, "sum"),
    ],
)
def test_step_with_unsharded_states_names_them_and_changes_nothing(
    kind: Any, options: dict[str, Any], states: str
) -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2, bias=False)))
    optimizer = loaded_from_unsharded(model, kind, **options)
    params = list(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    before = [param.to_local().clone() for param in params]
    with pytest.raises(RuntimeError, match=r"set_optimizer_state_dict\(.*rekey_optim_state_dict\(") as caught:
        optimizer.step()
    named = f"unsharded states ({states}) of the sharded parameters 0.weight, 0.bias, 1.weight"
    assert named in str(caught.value)
    assert all(torch.equal(param.to_local(), value) for param, value in zip(params, before, strict=True))
    assert {float(state.get("step", 1)) for state in optimizer.state.values()} == {1.0}


def test_other_optimizers_may_have_unsharded_states() -> None:
    """Only the steps of torch's own optimizers fail. A user's step may read unsharded states correctly."""

    class OwnStep(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                param.to_local().sub_(self.state[param]["momentum_buffer"].mean())

    model = fully_shard(nn.Linear(2, 2))
    optimizer = loaded_from_unsharded(model, torch.optim.SGD, momentum=0.9)
    own = OwnStep(model.parameters())
    own.load_state_dict(optimizer.state_dict())
    before = model.weight.to_local().clone()
    own.step()
    assert torch.equal(model.weight.to_local(), before - 1)


def test_dtensors_of_no_unit_may_have_unsharded_states() -> None:
    mesh = fully_shard(nn.Linear(2, 2)).weight.device_mesh
    scalar = nn.Parameter(distribute_tensor(torch.tensor(1.0), mesh, [Replicate()]))
    optimizer = torch.optim.Adam([scalar], 0.5)
    for _ in range(2):
        scalar.grad = distribute_tensor(torch.tensor(1.0), mesh, [Replicate()])
        optimizer.step()  # the step count has the shape of the parameter
    assert torch.allclose(scalar.to_local(), torch.tensor(0.0), atol=1e-3)


def test_error_of_unsharded_states_of_other_dtensors_is_that_of_torch() -> None:
    mesh = fully_shard(nn.Linear(2, 2)).weight.device_mesh
    replicated = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([replicated], 0.5, momentum=0.9)
    optimizer.state[replicated]["momentum_buffer"] = torch.ones(2)
    replicated.grad = torch.ones_like(replicated)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        optimizer.step()


@pytest.mark.parametrize("shard", [fully_shard, FullyShardedDataParallel])
def test_optimizer_made_before_sharding_raises_as_long_as_model_exists(shard: Any) -> None:
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    model = shard(plain)
    with pytest.raises(RuntimeError, match="steps weight, bias as they were before sharding"):
        optimizer.step()
    del plain, model
    gc.collect()
    optimizer.step()
