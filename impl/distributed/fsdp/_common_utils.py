"""What torch.distributed.checkpoint.state_dict asks about a module, for `impl.drop_in` to put in torch's place."""

from __future__ import annotations

from torch import nn

from impl.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["_get_module_fsdp_state_if_fully_sharded_module"]


def _get_module_fsdp_state_if_fully_sharded_module(module: nn.Module) -> FullyShardedDataParallel | None:
    """The state by which a module is sharded: a wrapper is its own; of any other module there is none."""
    return module if isinstance(module, FullyShardedDataParallel) else None
