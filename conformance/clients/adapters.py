"""What two ranks on a CPU need where a library or torch refuses them: the least that lets both sides run."""

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
    """accelerate shards on accelerators alone, several processes on CPUs get DDP: they count as GPUs here."""

    def backend(*args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    # What it keeps in the environment goes with the block, and what it keeps in the process goes before it.
    with mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu"):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        with mock.patch.object(PartialState, "_prepare_backend", backend), states_stay():
            yield


@contextlib.contextmanager
def lightning_on_the_cpu() -> Iterator[None]:
    """Lightning tells FSDP the number of its device, which a CPU has not; without one torch wants an accelerator."""
    init = FullyShardedDataParallel.__init__

    def on_the_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs | {"device_id": torch.device("cpu")})

    with mock.patch.object(FullyShardedDataParallel, "__init__", on_the_cpu), states_stay():
        yield


@contextlib.contextmanager
def states_stay() -> Iterator[None]:
    """Full states to be copied to the CPU lie there, and asked for that copy torch ends the process or mixes them up.

    Rows fsdp.full_state_dict_to_cpu of reference_limits.toml and optim_state.tensors_of_their_own of deviations.toml.
    """
    no = property(lambda self: False, lambda self, value: None)
    with (
        mock.patch.object(FullStateDictConfig, "offload_to_cpu", no),
        mock.patch.object(FullOptimStateDictConfig, "offload_to_cpu", no),
    ):
        yield
