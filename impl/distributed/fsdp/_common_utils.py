"""Lookup that torch.distributed.checkpoint.state_dict uses. `impl.drop_in` replaces torch's function by it."""

from __future__ import annotations

from torch import nn

from impl.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["_get_module_fsdp_state_if_fully_sharded_module"]


def _get_module_fsdp_state_if_fully_sharded_module(module: nn.Module) -> FullyShardedDataParallel | None:
    """Return the state of a sharded module: a wrapper itself, or None for any other module."""
    return module if isinstance(module, FullyShardedDataParallel) else None
