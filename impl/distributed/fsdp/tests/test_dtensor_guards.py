"""Guards of the facts about DTensors that `fused_step` and clipping keep between calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from conformance.distributed.fsdp.test_scale import world_of
from impl.amp import GradScaler
from impl.optim import _fused_updates
from impl.optim._mesh_placements import mesh_placements
from impl.optim._shards import shardings_of

pytestmark = pytest.mark.deadline(120)


def _dtensor(local: Tensor, mesh: DeviceMesh, *placements: Placement) -> Any:
    return DTensor.from_local(local, mesh, placements or [Shard(0)])


def _other_gradient(param: Any, state: dict[str, Any]) -> None:
    param.grad = _dtensor(torch.full((2, 4), 5.0), param.device_mesh)


def _other_gradient_dtype(param: Any, state: dict[str, Any]) -> None:
    param.grad_dtype = None
    param.grad = _dtensor(torch.full((2, 4), 5.0, dtype=torch.bfloat16), param.device_mesh)


def _other_gradient_order(param: Any, state: dict[str, Any]) -> None:
    param.grad._local_tensor = torch.arange(8.0).view(4, 2).t()


def _other_local_gradient(param: Any, state: dict[str, Any]) -> None:
    param.grad._local_tensor = torch.full((2, 4), 7.0)


def _other_local_parameter(param: Any, state: dict[str, Any]) -> None:
    param._local_tensor = param._local_tensor.detach() * 2


def _other_address(param: Any, state: dict[str, Any]) -> None:
    param._local_tensor.data = torch.full((2, 4), 3.0)


def _other_local_state(param: Any, state: dict[str, Any]) -> None:
    state["exp_avg"]._local_tensor = torch.full((2, 4), 0.5)


def _other_state(param: Any, state: dict[str, Any]) -> None:
    state["exp_avg"] = _dtensor(torch.full((2, 4), 0.5), param.device_mesh)


def _no_gradient(param: Any, state: dict[str, Any]) -> None:
    param.grad = None


_CHANGES = [
    _other_gradient,
    _other_gradient_dtype,
    _other_gradient_order,
    _other_local_gradient,
    _other_local_parameter,
    _other_address,
    _other_local_state,
    _other_state,
    _no_gradient,
]


def _training(mesh: DeviceMesh) -> tuple[list[Any], torch.optim.Optimizer, GradScaler]:
    """Return two parameters with gradients, an optimizer of them, and a scaler."""
    params = [nn.Parameter(_dtensor(torch.full((2, 4), float(i + 1)), mesh)) for i in range(2)]
    for param in params:
        param.grad = _dtensor(torch.ones(2, 4), mesh)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    return params, torch.optim.AdamW(params, lr=0.5), scaler


def _after_change(change: Callable[[Any, dict[str, Any]], None], forgets: bool) -> list[Tensor]:
    """Return the norm and the local parameters of a step after a change, with or without what was kept."""
    params, optimizer, scaler = _training(init_device_mesh("cpu", (2,)))
    for _ in range(3):
        scaler.fused_step(optimizer, max_norm=1.0)
    change(params[1], optimizer.state[params[1]])
    if forgets:
        del _fused_updates._lists_of[optimizer]
    norm = scaler.fused_step(optimizer, max_norm=1.0)
    return [norm, *(param._local_tensor.detach().clone() for param in params)]


@pytest.mark.parametrize("change", _CHANGES)
def test_fused_step_notices_change_of_dtensors(change: Callable[[Any, dict[str, Any]], None]) -> None:
    with world_of(2):
        actual, expected = _after_change(change, forgets=False), _after_change(change, forgets=True)
        for tensor, other in zip(actual, expected, strict=True):
            assert torch.equal(tensor, other), f"{change.__name__}: {tensor} instead of {other}"


def test_fused_step_notices_other_placements_of_gradient() -> None:
    # On one rank all placements have the same local tensors.
    with world_of(1):
        mesh = init_device_mesh("cpu", (1,))
        params, optimizer, scaler = _training(mesh)
        for _ in range(3):
            scaler.fused_step(optimizer)
        assert scaler.explain(optimizer).is_fused
        params[1].grad = _dtensor(torch.ones(2, 4), mesh, Replicate())
        scaler.fused_step(optimizer)
        assert "its gradient is sharded differently" in str(scaler.explain(optimizer))


def test_fused_step_keeps_no_local_tensor() -> None:
    with world_of(2):
        params, optimizer, scaler = _training(init_device_mesh("cpu", (2,)))
        for _ in range(3):
            scaler.fused_step(optimizer)
        locals_ = [params[0]._local_tensor, params[0].grad._local_tensor]
        locals_.append(optimizer.state[params[0]]["exp_avg"]._local_tensor)
        alive = [weakref.ref(local) for local in locals_]
        params[0]._local_tensor = params[0]._local_tensor.clone()
        params[0].grad = None
        optimizer.state[params[0]]["exp_avg"]._local_tensor = torch.zeros(2, 4)
        del locals_
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3


def test_mesh_placements_notice_each_change() -> None:
    with world_of(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rows = [_dtensor(torch.ones(2), mesh["dp"]) for _ in range(3)]
        sharding = shardings_of(rows)[0]
        assert sharding.groups == (mesh["dp"].get_group(),)
        assert mesh_placements(rows) is mesh_placements([*rows])
        # A list of the same length: one other tensor, then the same tensor with another specification.
        others = [rows[0], rows[1], _dtensor(torch.ones(2), mesh["dp"], Replicate())]
        assert [entry.groups for entry in shardings_of(others)] == [sharding.groups] * 2 + [()]
        assert shardings_of(rows) == [sharding] * 3
        rows[0]._spec = others[2]._spec
        assert [entry.groups for entry in shardings_of(rows)] == [(), *[sharding.groups] * 2]
        rows[0]._spec.placements = (Shard(0),)
        assert shardings_of(rows) == [sharding] * 3
        rows[1]._spec.mesh = mesh["tp"]
        assert [entry.groups for entry in shardings_of(rows)] == [
            sharding.groups,
            (mesh["tp"].get_group(),),
            sharding.groups,
        ]
        plain = [torch.ones(2), rows[0], torch.ones(2)]
        assert [entry.groups for entry in shardings_of(plain)] == [(), sharding.groups, ()]
