"""A training step of each subject: torch's and impl's `fully_shard` and FSDP, sharded block by block."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance.simulator.cost.llama import Llama, LlamaBlock, LlamaConfig, loss
from conformance.simulator.cost.trace import Trace, tracing
from conformance.simulator.device import NAME

_DEVICE = f"{NAME}:0"


@dataclass(frozen=True)
class CostedTraining:
    """Model and batch of a training, by default those of the published figures."""

    model: LlamaConfig = field(default_factory=LlamaConfig)
    batch: int = 2  # sequences on each rank
    length: int = 8192

    @property
    def tokens(self) -> int:
        return self.batch * self.length


def _mesh(ranks: int, replicas: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(NAME, (ranks,))
    return init_device_mesh(NAME, (replicas, ranks // replicas), mesh_dim_names=("replicas", "shards"))


def fully_sharded(library: ModuleType, model: Llama, ranks: int, *, replicas: int = 1) -> nn.Module:
    options: dict[str, Any] = {
        "mesh": _mesh(ranks, replicas),
        "mp_policy": library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model.layers:
        library.fully_shard(layer, reshard_after_forward=layer is not model.layers[-1], **options)
    library.fully_shard(model, **options)
    return model.to_empty(device=_DEVICE)


def flat_sharded(
    library: ModuleType, model: Llama, ranks: int, *, replicas: int = 1, **options: Any
) -> nn.Module:
    strategy = library.ShardingStrategy
    return library.FullyShardedDataParallel(
        model,
        device_mesh=_mesh(ranks, replicas),
        sharding_strategy=strategy.FULL_SHARD if replicas == 1 else strategy.HYBRID_SHARD,
        auto_wrap_policy=library.wrap.ModuleWrapPolicy({LlamaBlock}),
        mixed_precision=library.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=torch.device(_DEVICE),
        use_orig_params=True,
        param_init_fn=lambda module: module.to_empty(device=_DEVICE, recurse=False),
        **options,
    )


def _clip(of: str) -> Callable[[nn.Module], object]:
    return lambda model: importlib.import_module(of).clip_grad_norm_(model.parameters(), 1.0, foreach=True)


@dataclass(frozen=True)
class Subject:
    library: str
    shard: Callable[[ModuleType, Llama, int], nn.Module]
    clip: Callable[[nn.Module], object]


SUBJECTS = {
    "torch fully_shard": Subject("torch.distributed.fsdp", fully_sharded, _clip("torch.nn.utils")),
    "impl fully_shard": Subject("impl.distributed.fsdp", fully_sharded, _clip("impl.nn.utils")),
    "torch FSDP": Subject("torch.distributed.fsdp", flat_sharded, lambda model: model.clip_grad_norm_(1.0)),  # type: ignore[operator]
    "impl FSDP": Subject("impl.distributed.fsdp", flat_sharded, lambda model: model.clip_grad_norm_(1.0)),  # type: ignore[operator]
}


def traced(name: str, training: CostedTraining, ranks: int) -> Trace:
    """Return the trace of two steps of rank 0. In the second step all memory is already allocated."""
    subject = SUBJECTS[name]
    with tracing(ranks) as tracer:
        with torch.device("meta"):
            model = Llama(training.model)
        sharded = subject.shard(importlib.import_module(subject.library), model, ranks)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, foreach=True)
        shape = (training.batch, training.length)
        tokens, labels = (torch.empty(shape, dtype=torch.int64, device=_DEVICE) for _ in range(2))
        for _ in range(2):
            tracer.mark()
            loss(sharded(tokens), labels).backward()
            subject.clip(sharded)
            optimizer.step()
            optimizer.zero_grad()
        tracer.mark()
        trace = tracer.trace()
        del model, sharded, optimizer, tokens, labels
        gc.collect()
    return trace
