"""Smallest patches that let both sides run on two CPU ranks, which a library or torch rejects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel


@contextlib.contextmanager
def accelerate_on_the_cpu() -> Iterator[None]:
    """Context manager that makes accelerate take CPU ranks for GPUs, because it would use DDP for CPU ranks."""

    def backend(*args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    # accelerate stores settings in the environment, restored after the block, and in the process, reset before it.
    with mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu"):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        with mock.patch.object(PartialState, "_prepare_backend", backend), states_stay():
            yield


@contextlib.contextmanager
def lightning_on_the_cpu() -> Iterator[None]:
    """Context manager that passes the CPU device to FSDP.

    Lightning would pass a device number, which a CPU does not have. Without a device, torch requires an accelerator.
    """
    init = FullyShardedDataParallel.__init__

    def on_the_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs | {"device_id": torch.device("cpu")})

    with mock.patch.object(FullyShardedDataParallel, "__init__", on_the_cpu), states_stay():
        yield


@contextlib.contextmanager
def states_stay() -> Iterator[None]:
    """Context manager that disables `offload_to_cpu` of full state dicts, whose tensors are on the CPU already.

    With it, torch ends the process or mixes up states: see fsdp.full_state_dict_to_cpu in reference_limits.toml and
    optim_state.tensors_of_their_own in deviations.toml.
    """
    no = property(lambda self: False, lambda self, value: None)
    with (
        mock.patch.object(FullStateDictConfig, "offload_to_cpu", no),
        mock.patch.object(FullOptimStateDictConfig, "offload_to_cpu", no),
    ):
        yield
