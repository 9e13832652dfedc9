"""Captured optimizers of DTensors, whose local tensors are updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from impl.optim import capture, explain

pytestmark = pytest.mark.usefixtures("fake_group")

OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, 0.1, foreach=True, amsgrad=True),
    "Adam single": lambda params: torch.optim.Adam(params, 0.1, foreach=False, weight_decay=0.1),
    "Adagrad foreach": lambda params: torch.optim.Adagrad(params, 0.1, foreach=True),
    "SGD foreach": lambda params: torch.optim.SGD(params, 0.1, foreach=True, weight_decay=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.1, foreach=True),
}


def local_values(number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


def dtensors(meshes: int, number: int = 0) -> list[Any]:
    """Return DTensors on one or two meshes. With two of them, add a plain tensor."""
    ranks = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))]
    placements: list[Any] = [[Shard(0)], [Shard(0), Replicate()]]
    result: list[Any] = [
        DTensor.from_local(local_values(number + index), ranks[index % meshes], placements[index % meshes])
        for index in range(4)
    ]
    return [*result, local_values(number + 4)] if meshes > 1 else result


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(params: list[Any], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Take three steps. Return the local parameters, and their states."""
    for number in (100, 200, 300):
        for param, grad in zip(params, dtensors(2 if len(params) == 5 else 1, number), strict=True):
            param.grad = grad if isinstance(param, DTensor) else local(grad)
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value is not None]
    return [local(tensor).detach().clone() for tensor in (*params, *states)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_captured_steps_of_dtensors_are_bit_identical(kind: str) -> None:
    plain, captured = ([nn.Parameter(tensor) for tensor in dtensors(1)] for _ in range(2))
    expected = train(plain, OPTIMIZERS[kind](plain))
    optimizer = capture(OPTIMIZERS[kind](captured))
    after = train(captured, optimizer)
    assert len(after) == len(expected)
    assert all(map(torch.equal, after, expected))
    assert all(isinstance(optimizer.state[param].get("exp_avg", param), DTensor) for param in captured)


@pytest.mark.parametrize(
    "kind", ["AdamW fused", "AdamW foreach", "Adam single", "Adagrad foreach", "SGD foreach"]
)
def test_captured_steps_of_several_meshes_match_plain_tensors(kind: str) -> None:
    captured = [nn.Parameter(tensor) for tensor in dtensors(2)]
    plain = [nn.Parameter(local(tensor)) for tensor in dtensors(2)]
    optimizer = capture(OPTIMIZERS[kind](captured))
    after = train(captured, optimizer)
    assert all(map(torch.equal, after, train(plain, OPTIMIZERS[kind](plain))))
    assert explain(optimizer).captured


@pytest.mark.parametrize("kind", ["AdamW fused", "Adagrad foreach"])
def test_learning_rates_that_are_dtensors_are_left_to_torch(kind: str) -> None:
    captured, plain = ([nn.Parameter(tensor) for tensor in dtensors(1)] for _ in range(2))
    optimizers = capture(OPTIMIZERS[kind](captured)), OPTIMIZERS[kind](plain)
    for optimizer in optimizers:
        rate = DTensor.from_local(torch.tensor(0.1), captured[0].device_mesh, [Replicate()])
        optimizer.param_groups[0]["lr"] = rate
    after, expected = map(train, (captured, plain), optimizers)
    assert all(map(torch.equal, after, expected))


@pytest.mark.skipif(
    torch.__version__ < "2.12.dev0", reason="the fake group of torch 2.11 fills no results of scatters"
)
@pytest.mark.parametrize("kind", ["AdamW fused", "AdamW foreach"])
def test_gradients_with_other_placements_are_left_to_torch(kind: str) -> None:
    """torch redistributes a partial gradient. Its local tensor is not the gradient of the parameter's shard."""
    captured, plain = ([nn.Parameter(dtensors(1)[0])] for _ in range(2))
    optimizers = capture(OPTIMIZERS[kind](captured)), OPTIMIZERS[kind](plain)
    for is_partial in (False, True, False):
        for params, optimizer in zip((captured, plain), optimizers, strict=True):
            grad = dtensors(1, 100)[0]
            if is_partial:
                value = torch.cat([grad.to_local()] * 2)
                grad = DTensor.from_local(value, grad.device_mesh, [Partial()], run_check=False)
            params[0].grad = grad
            optimizer.step()
        assert torch.equal(local(captured[0]), local(plain[0]))


@pytest.mark.parametrize("kind", ["AdamW fused", "AdamW foreach"])
def test_backward_after_captured_step_of_dtensors_raises(kind: str) -> None:
    param = nn.Parameter(dtensors(1)[0])
    optimizer = capture(OPTIMIZERS[kind]([param]))
    param.grad = dtensors(1, 100)[0]
    optimizer.step()
    loss = (param * param).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
