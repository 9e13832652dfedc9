"""Default devices of `fully_shard`, and meshes of single parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.distributed.fsdp.test_scale import world_of
from impl.distributed.fsdp import fully_shard
from impl.distributed.fsdp._fully_shard.init import group_by_mesh, mesh_of_all
from impl.distributed.fsdp._params.policies import MixedPrecisionPolicy


def test_missing_accelerator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is pip's wheel of torch on a machine without a GPU, which names cuda anyway."""
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with world_of(1):
        assert mesh_of_all().device_type == "cpu"


def test_param_mesh_with_unused_dimension_raises() -> None:
    with world_of(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "other"))
        info = SimpleNamespace(mesh=mesh, replicate_mesh_dim=None, shard_mesh_dim=1)
        placement = SimpleNamespace(placement=None, mesh_info=info)
        with pytest.raises(
            NotImplementedError, match=r"mesh of 2 dimensions.* over \(None, 1\); give one of one"
        ):
            fully_shard(nn.Linear(2, 2), mesh=mesh_of_all(), shard_placement_fn=lambda _: placement)


def test_param_mesh_with_dp_mesh_dims_raises() -> None:
    managed: Any = [SimpleNamespace(info=SimpleNamespace(name="weight"), original=None)]
    data_dims: Any = SimpleNamespace(shard=(0,))
    with pytest.raises(
        NotImplementedError, match="weight has its own mesh, and dp_mesh_dims was passed; remove one of them"
    ):
        group_by_mesh(
            managed,
            lambda _: SimpleNamespace(placement=None, mesh_info=data_dims),
            data_dims,
            data_dims,
            MixedPrecisionPolicy(),
        )
