"""How fully_shard computes, keeps and lays out parameters, as its user asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of what one call of fully_shard takes over; parameters and `.grad` keep their own.

    Args:
        param_dtype: to compute and to gather in; None: the parameters' own.
        reduce_dtype: to reduce gradients in, and to add up in where they are not synchronised; None: as computed.
        output_dtype: that floating-point outputs of the modules are cast to.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.

    Source: torch.distributed.fsdp.MixedPrecisionPolicy 2.13; differences: none.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16).cast_forward_inputs
    True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """Parameters, gradients and optimizer states stay on the device.

    Source: torch.distributed.fsdp.OffloadPolicy 2.13; differences: none.

    >>> OffloadPolicy() == OffloadPolicy()
    True
    """


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, their gradients and the optimizer's states lie on the CPU.

    Args:
        pin_memory: in memory that is copied from without the host waiting; of no effect where there is no accelerator.

    Source: torch.distributed.fsdp.CPUOffloadPolicy 2.13; differences: torch raises where there is no accelerator.

    >>> CPUOffloadPolicy().pin_memory
    True
    """

    pin_memory: bool = True


@dataclass
class DataParallelMeshDims:
    """Dimensions of a whole mesh, by name, that data parallelism is over.

    Args:
        shard: over which parameters are sharded.
        replicate: over which copies of the shards are kept.

    Raises:
        ValueError: neither is given.
    Source: torch.distributed.fsdp.DataParallelMeshDims 2.13; differences: none.

    >>> DataParallelMeshDims(shard="data").shard_names
    ('data',)
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
