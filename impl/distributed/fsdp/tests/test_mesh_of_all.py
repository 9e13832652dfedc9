"""Which devices `fully_shard` takes where it is given no mesh, and which meshes it takes for a parameter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from impl.distributed.fsdp import fully_shard
from impl.distributed.fsdp._fully_shard.init import by_groups, mesh_of_all
from impl.distributed.fsdp._params.policies import MixedPrecisionPolicy
from impl.distributed.fsdp.tests.streamed import world_of


def test_what_torch_was_built_for_and_is_not_there_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip's wheel of torch on a machine without a GPU, which names cuda all the same."""
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with world_of(1):
        assert mesh_of_all().device_type == "cpu"


def test_a_parameters_mesh_of_which_a_dimension_is_left_is_refused() -> None:
    with world_of(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "other"))
        info = SimpleNamespace(mesh=mesh, replicate_mesh_dim=None, shard_mesh_dim=1)
        placed = SimpleNamespace(placement=None, mesh_info=info)
        with pytest.raises(
            NotImplementedError, match=r"mesh of 2 dimensions.* over \(None, 1\); give one of one"
        ):
            fully_shard(nn.Linear(2, 2), mesh=mesh_of_all(), shard_placement_fn=lambda _: placed)


def test_a_parameters_mesh_beside_named_dimensions_of_all_is_refused() -> None:
    managed: Any = [SimpleNamespace(info=SimpleNamespace(name="weight"), original=None)]
    given: Any = SimpleNamespace(shard=(0,))
    with pytest.raises(
        NotImplementedError, match="weight has a mesh of its own, beside dp_mesh_dims; leave one out"
    ):
        by_groups(
            managed,
            lambda _: SimpleNamespace(placement=None, mesh_info=given),
            given,
            given,
            MixedPrecisionPolicy(),
        )
