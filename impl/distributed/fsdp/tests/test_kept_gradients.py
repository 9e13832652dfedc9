"""Tests of gradients that wait for a finalization, or that hooks keep, on one rank of two that send nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

from impl.distributed.fsdp import FullyShardedDataParallel, fully_shard
from impl.distributed.fsdp._params.autograd import is_linearized

pytestmark = pytest.mark.usefixtures("fake_group")
compares_gradients = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 12), reason="the fake group of torch 2.11 writes no results"
)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        raise KeyError("in a backward")


class _Late(nn.Module):
    """Module whose input is differentiated before the gradient of `second` is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.second * 2
        return x * self.first + scaled * 3


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        hidden = self.inner(x)
        return self.outer(_Fail.apply(hidden) if fails else hidden).sum()


def _late_gradients(*, manual: bool) -> list[Tensor]:
    model: Any = nn.Sequential(_Late())
    fully_shard(model[0])
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    model.set_manual_backward_finalization(manual)
    model(torch.ones(2)).sum().backward()
    model(torch.ones(2).requires_grad_()).sum().backward()
    if manual:
        model.finalize_backward()
    return [param.grad.to_local() for param in model.parameters()]


@compares_gradients
def test_finalization_keeps_gradients_that_come_after_a_reduction() -> None:
    for grad, expected in zip(_late_gradients(manual=True), _late_gradients(manual=False), strict=True):
        assert torch.equal(grad, expected)


def test_finalization_refuses_gradients_of_a_failed_backward() -> None:
    model: Any = _TwoLayers()
    for module in (model.inner, model.outer, model):
        fully_shard(module)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).backward()
    with pytest.raises(KeyError):
        model(torch.ones(1, 2), fails=True).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match=r"added some of its gradients .* of outer\.weight; drop them"):
        model.finalize_backward()


def test_result_of_a_hook_stays_unchanged() -> None:
    model: Any = fully_shard(nn.Linear(2, 2, bias=False))
    fixed = torch.ones_like(model.weight)
    model.weight.register_hook(lambda grad: fixed)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(fixed.to_local(), torch.ones(1, 2))
    assert torch.equal(model.weight.grad.to_local(), torch.full((1, 2), 3.0))


@pytest.mark.parametrize("is_flat", [False, True])
def test_gradient_that_a_hook_keeps_stays_unchanged(is_flat: bool) -> None:
    layer = nn.Linear(2, 2, bias=False)
    model: Any = (
        FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))
        if is_flat
        else fully_shard(layer)
    )
    hook_grads: list[Tensor] = []
    (param,) = model.parameters()
    param.register_hook(hook_grads.append)
    model(torch.ones(1, 2)).sum().backward()
    before = hook_grads[0].clone()
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(hook_grads[0], before)


def test_no_sync_of_the_modules_own_class_is_kept() -> None:
    class Own(nn.Linear):
        def no_sync(self) -> str:
            return "own"

    assert fully_shard(Own(2, 2)).no_sync() == "own"


def test_incomplete_gradients_that_were_zeroed_are_complete_again() -> None:
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    layers = _TwoLayers()
    layers.outer = FullyShardedDataParallel(layers.outer, **options)
    model = FullyShardedDataParallel(layers, **options)
    with model.no_sync():
        model(torch.ones(1, 2)).backward()
        with pytest.raises(KeyError):
            model(torch.ones(1, 2), fails=True).backward()
    model.zero_grad(set_to_none=False)
    with model.no_sync():
        model(torch.ones(1, 2)).backward()
    expected = [param.grad.clone() for param in model.parameters()]
    with model.no_sync():
        model(torch.ones(1, 2)).backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, 2 * grad)


@compares_gradients
def test_forward_after_failed_linearized_forward_keeps_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = fully_shard(nn.Linear(2, 2, bias=False))
    model = fully_shard(nn.Sequential(inner))
    x = torch.ones(1, 2)
    model(x).sum().backward()
    expected = inner.weight.grad.to_local().clone()
    model.zero_grad()
    unit = inner._get_fsdp_state().unit
    gather = unit.gather
    with monkeypatch.context() as patch:
        # The first forward of linearize records nothing.
        patch.setattr(unit, "gather", lambda: _Fail.backward(None) if is_linearized() else gather())
        with pytest.raises(KeyError):
            torch.func.linearize(model, x)
    model(x).sum().backward()
    assert inner.weight.grad is not None
    assert torch.equal(inner.weight.grad.to_local(), expected)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_failed_backward_leaves_sums_of_replicas(is_deferred: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    layers = _TwoLayers()
    fully_shard(layers.outer, mesh=mesh)
    model = fully_shard(layers, mesh=mesh)

    def gradients(*, fails: bool) -> list[Tensor]:
        model.zero_grad()
        model.set_requires_all_reduce(False)
        model(torch.ones(1, 2)).backward()
        model.set_requires_all_reduce(not is_deferred)
        if fails:
            with pytest.raises(KeyError):
                model(torch.ones(1, 2), fails=True).backward()
        model.set_requires_all_reduce(True)
        model(torch.ones(1, 2)).backward()
        return [param.grad.to_local().clone() for param in model.parameters()]

    for actual, expected in zip(gradients(fails=True), gradients(fails=False), strict=True):
        assert torch.equal(actual, expected)
