"""Constructor arguments of FullyShardedDataParallel, and the options of a unit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from impl.distributed.fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
_FREED_AFTER_FORWARD = (None, ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def _is_set_in_environment() -> bool:
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1"


@dataclass(frozen=True)
class UnitOptions:
    """Options of FullyShardedDataParallel that its units follow. The defaults are what `fully_shard` does."""

    input_dtype: torch.dtype | None = None  # floating-point inputs of forwards are cast to it
    forward_prefetch: bool = False
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    full_precision_in_eval: bool = False


@dataclass(frozen=True)
class Config:
    """Arguments of FullyShardedDataParallel that nested units get too. The fields have the arguments' names."""

    process_group: ProcessGroups = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    device_mesh: DeviceMesh | None = None
    full_precision_in_eval: bool = field(default_factory=_is_set_in_environment, init=False)

    @property
    def arguments(self) -> dict[str, Any]:
        return {option.name: getattr(self, option.name) for option in fields(self) if option.init}

    @cached_property
    def precision(self) -> MixedPrecision:
        return self.mixed_precision or MixedPrecision()

    @property
    def unit_options(self) -> UnitOptions:
        precision = self.precision
        return UnitOptions(
            input_dtype=precision.param_dtype if precision.cast_forward_inputs else None,
            forward_prefetch=self.forward_prefetch,
            backward_prefetch=self.backward_prefetch,
            full_precision_in_eval=self.full_precision_in_eval,
        )

    @property
    def offloads(self) -> bool:
        return self.cpu_offload is not None and self.cpu_offload.offload_params

    @property
    def frees_after_forward(self) -> bool:
        """Whether the parameters are unsharded only while the unit computes, not from forward to backward."""
        return self.sharding_strategy in _FREED_AFTER_FORWARD
