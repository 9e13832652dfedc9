"""Mirrors `torch.distributed.fsdp`: parameters, gradients and optimizer states sharded over the ranks.

Terms:
    unit             a wrapped module. Its parameters, except those of inner units, are gathered together
    flat parameter   a unit's parameters, contiguous in one buffer
    shard            the part of a flat parameter that one rank owns
    unshard          gather all of a flat parameter on every rank
    reshard          free the gathered elements; the rank's shard stays
"""

from impl._after_dynamo import import_after_dynamo
from impl.distributed.fsdp._engine.unsynchronized_steps import set_detect_unsynchronized_step
from impl.distributed.fsdp._fully_shard.reduction_handle import GradientReductionHandle
from impl.distributed.fsdp._param_precisions import param_precisions
from impl.distributed.fsdp._params.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamPrecision,
    PerParamPrecisionPolicy,
)
from impl.distributed.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from impl.distributed.fsdp.fully_shard import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from impl.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel, OptimStateKeyType
from impl.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ParamPrecision",
    "PerParamPrecisionPolicy",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "fully_shard",
    "param_precisions",
    "register_fsdp_forward_method",
    "set_detect_unsynchronized_step",
    "share_comm_ctx",
]

import_after_dynamo("impl.dynamo.fsdp")
