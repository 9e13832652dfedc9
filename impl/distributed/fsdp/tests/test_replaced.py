"""Replaced parameters of impl's sharded models keep their shard groups, which norms are taken over, and their order."""

from __future__ import annotations

import pytest
from torch import nn

from conformance.distributed.fsdp.test_scale import world_of
from impl.distributed.fsdp import FullyShardedDataParallel, StateDictType
from impl.distributed.fsdp._flat_param import FlatParameter
from impl.optim._shards import Sharding, shardings_of


def test_flat_parameter_from_meta_device_keeps_shard_groups() -> None:
    with world_of(4):
        model = FullyShardedDataParallel(nn.Linear(8, 4))
        model.to("meta").to_empty(device="cpu")
        [parameter] = model.parameters()
        assert isinstance(parameter, FlatParameter)
        assert parameter._fqns == ("weight", "bias")
        assert shardings_of([parameter]) == [Sharding((model.process_group,))]


def test_replaced_original_parameter_keeps_shard_groups() -> None:
    with world_of(4):
        model = FullyShardedDataParallel(nn.Linear(8, 4), use_orig_params=True)
        model.module.weight = nn.Parameter(model.module.weight.detach().clone())
        model(model.module.weight.new_ones(2, 8))
        assert shardings_of([model.module.weight]) == [Sharding((model.process_group,))]


@pytest.mark.parametrize("kind", StateDictType)
def test_flat_parameters_keep_their_order(kind: StateDictType) -> None:
    """A unit that mixes frozen and trained parameters has two flat parameters. torch refuses it."""
    layer = nn.Linear(8, 4)
    layer.bias.requires_grad_(False)
    with world_of(1):
        model = FullyShardedDataParallel(layer)
        names = [name for name, _ in model.named_parameters()]
        assert len(names) == 2
        with FullyShardedDataParallel.state_dict_type(model, kind):
            model.load_state_dict(model.state_dict())
        model.double()
        assert [name for name, _ in model.named_parameters()] == names
