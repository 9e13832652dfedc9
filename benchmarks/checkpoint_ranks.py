"""Cases for the ranks of bench_fsdp_checkpoint.py: save and load the state of a sharded model and its optimizer."""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import state_dict as helpers

from benchmarks import process_memory
from benchmarks.common import member
from benchmarks.fsdp_ranks import flat_sharded, fully_sharded
from impl.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)


@functools.cache
def _stepped(subject: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model after a step, and its optimizer, which has two state tensors per parameter."""
    torch.manual_seed(0)
    model = fully_sharded("torch") if subject == "FSDP2" else flat_sharded(subject, use_orig_params=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@contextlib.contextmanager
def _state_dict_type(subject: str, model: nn.Module, kind: str, rank0_only: bool) -> Iterator[Any]:
    # The configs offload nothing, because torch cannot offload full parameters of a CPU model.
    fsdp = member(subject, "distributed.fsdp.FullyShardedDataParallel")
    configs = {
        "FULL": lambda: (
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=rank0_only),
            FullOptimStateDictConfig(rank0_only=rank0_only),
        ),
        "SHARDED": lambda: (
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ),
    }
    with warnings.catch_warnings(action="ignore"), fsdp.state_dict_type(model, *configs[kind]()):
        yield fsdp


def _state_of(subject: str, saved_object: str, kind: str, rank0_only: bool) -> dict[str, Any]:
    model, optimizer = _stepped(subject)
    if subject == "FSDP2":
        options = helpers.StateDictOptions(full_state_dict=kind == "FULL", cpu_offload=rank0_only)
        if saved_object == "model":
            return helpers.get_model_state_dict(model, options=options)
        return helpers.get_optimizer_state_dict(model, optimizer, options=options)
    with _state_dict_type(subject, model, kind, rank0_only) as fsdp:
        return model.state_dict() if saved_object == "model" else fsdp.optim_state_dict(model, optimizer)


@functools.cache
def _to_load(subject: str, saved_object: str, kind: str) -> dict[str, Any]:
    return _state_of(subject, saved_object, kind, rank0_only=False)


def save(rank: Any, *, subject: str, saved_object: str, kind: str) -> None:
    _state_of(subject, saved_object, kind, rank0_only=True)


def load(rank: Any, *, subject: str, saved_object: str, kind: str) -> None:
    model, optimizer = _stepped(subject)
    state = _to_load(subject, saved_object, kind)
    with _state_dict_type(subject, model, kind, rank0_only=False) as fsdp:
        if saved_object == "model":
            model.load_state_dict(state)
        else:
            optimizer.load_state_dict(fsdp.optim_state_dict_to_load(model, optimizer, state))


def first_values(rank: Any, *, subject: str, saved_object: str, kind: str, loads: bool) -> list[Tensor]:
    """Return the first values of each saved tensor, or of the model's and optimizer's own tensors after loading."""
    if loads:
        load(rank, subject=subject, saved_object=saved_object, kind=kind)
        model, optimizer = _stepped(subject)
        states = optimizer.state.values()
        is_model = saved_object == "model"
        values = list(model.parameters()) if is_model else [state["exp_avg"] for state in states]
    else:
        saved = _state_of(subject, saved_object, kind, rank0_only=True)
        if not saved:  # a rank without a full state
            return []
        states = (
            saved
            if saved_object == "model"
            else {name: state["exp_avg"] for name, state in saved["state"].items()}
        )
        values = [
            states[name].local_shards()[0].tensor if isinstance(states[name], ShardedTensor) else states[name]
            for name in sorted(states)
        ]
    return [value.detach().flatten()[:100].clone() for value in values]


def peak_bytes(rank: Any, *, subject: str, saved_object: str, kind: str) -> int:
    """Return the peak memory of this process while it saves, above its memory with model and optimizer."""
    for _ in range(2):
        save(rank, subject=subject, saved_object=saved_object, kind=kind)
    before = process_memory.resident_bytes()
    process_memory.forget_peak()
    save(rank, subject=subject, saved_object=saved_object, kind=kind)
    return process_memory.peak_bytes() - before
