"""Gradient hooks that parameters on the meta device and DTensors had before FullyShardedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from impl.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

pytestmark = pytest.mark.usefixtures("fake_group")
both_kinds = pytest.mark.parametrize("use_orig_params", [False, True])


@both_kinds
def test_hooks_of_meta_parameters_run_after_materialization(use_orig_params: bool) -> None:
    model = nn.Linear(2, 2, device="meta")
    shapes: list[Any] = []
    model.weight.register_hook(lambda grad: shapes.append(tuple(grad.shape)))
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    wrapped(torch.ones(1, 2)).sum().backward()
    # Original parameters get this rank's piece: three of six elements.
    assert shapes == [(3,) if use_orig_params else (2, 2)]


@both_kinds
def test_hooks_of_dtensors_get_gradients_of_layout(use_orig_params: bool) -> None:
    def gradients(factor: float | None) -> tuple[list[Any], list[torch.Tensor]]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(nn.Linear(2, 4), mesh["tp"], ColwiseParallel())
        hooked: list[Any] = []
        for param in model.parameters() if factor is not None else ():
            param.register_hook(lambda grad: hooked.append(grad) or factor * grad)
        wrapped = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_mesh=mesh["dp"],
            use_orig_params=use_orig_params,
        )
        wrapped(torch.ones(1, 2)).sum().backward()
        return hooked, [param.grad for param in wrapped.parameters() if param.grad is not None]

    hooked, tripled = gradients(3.0)
    _, plain = gradients(None)
    layouts = {(isinstance(grad, DTensor), tuple(grad.shape)) for grad in hooked}
    # Original parameters are local tensors.
    assert layouts == (
        {(False, (2, 2)), (False, (2,))} if use_orig_params else {(True, (4, 2)), (True, (4,))}
    )
    assert plain
    assert all(torch.equal(grad, 3 * other) for grad, other in zip(tripled, plain, strict=True))
