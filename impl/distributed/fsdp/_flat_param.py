"""What FullyShardedDataParallel shows of a unit's parameters unless it is told to show the user's own."""

from __future__ import annotations

from torch import nn


class FlatParameter(nn.Parameter):
    """A rank's shard of a unit's parameters: 1-D, as long on every rank; zeros fill its tail."""

    _fsdp_flattened = True  # torch's name, by which Lightning tells that an optimizer has parameters of units
    # How its parameters are named below the unit; torch's name, which torch.distributed.checkpoint.state_dict asks for.
    _fqns: tuple[str, ...]
