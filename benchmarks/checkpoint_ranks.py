"""What the ranks of bench_fsdp_checkpoint.py do: save and load the state of a sharded model and of its optimizer."""

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
from benchmarks.fsdp_ranks import Block, Transformer, fully_sharded
from impl.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)


@functools.cache
def _stepped(subject: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and an optimizer that keeps two tensors for each parameter."""
    torch.manual_seed(0)
    model = fully_sharded("torch") if subject == "FSDP2" else _wrapped(subject)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _wrapped(subject: str) -> nn.Module:
    return member(subject, "distributed.fsdp.FullyShardedDataParallel")(
        Transformer(),
        auto_wrap_policy=member(subject, "distributed.fsdp.wrap.ModuleWrapPolicy")({Block}),
        device_id=torch.device("cpu"),
    )


@contextlib.contextmanager
def _form(subject: str, model: nn.Module, kind: str, rank0_only: bool) -> Iterator[Any]:
    """torch cannot offload whole parameters on a CPU."""
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


def _saved(subject: str, what: str, kind: str, rank0_only: bool) -> dict[str, Any]:
    model, optimizer = _stepped(subject)
    if subject == "FSDP2":
        options = helpers.StateDictOptions(full_state_dict=kind == "FULL", cpu_offload=rank0_only)
        if what == "model":
            return helpers.get_model_state_dict(model, options=options)
        return helpers.get_optimizer_state_dict(model, optimizer, options=options)
    with _form(subject, model, kind, rank0_only) as fsdp:
        return model.state_dict() if what == "model" else fsdp.optim_state_dict(model, optimizer)


@functools.cache
def _to_load(subject: str, what: str, kind: str) -> dict[str, Any]:
    return _saved(subject, what, kind, rank0_only=False)


def save(rank: Any, *, subject: str, what: str, kind: str) -> None:
    _saved(subject, what, kind, rank0_only=True)


def load(rank: Any, *, subject: str, what: str, kind: str) -> None:
    model, optimizer = _stepped(subject)
    given = _to_load(subject, what, kind)
    with _form(subject, model, kind, rank0_only=False) as fsdp:
        if what == "model":
            model.load_state_dict(given)
        else:
            optimizer.load_state_dict(fsdp.optim_state_dict_to_load(model, optimizer, given))


def first_values(rank: Any, *, subject: str, what: str, kind: str, loads: bool) -> list[Tensor]:
    """Of what is saved, or of what the rank steps once it was loaded."""
    if loads:
        load(rank, subject=subject, what=what, kind=kind)
        model, optimizer = _stepped(subject)
        states = optimizer.state.values()
        values = list(model.parameters()) if what == "model" else [state["exp_avg"] for state in states]
    else:
        saved = _saved(subject, what, kind, rank0_only=True)
        if not saved:  # of a rank that is to have nothing
            return []
        states = saved if what == "model" else {name: one["exp_avg"] for name, one in saved["state"].items()}
        values = [
            states[name].local_shards()[0].tensor if isinstance(states[name], ShardedTensor) else states[name]
            for name in sorted(states)
        ]
    return [value.detach().flatten()[:100].clone() for value in values]


def peak_bytes(rank: Any, *, subject: str, what: str, kind: str) -> int:
    """Of this process while it saves, above what it holds with the model and its optimizer."""
    for _ in range(2):
        save(rank, subject=subject, what=what, kind=kind)
    before = process_memory.resident_bytes()
    process_memory.forget_peak()
    save(rank, subject=subject, what=what, kind=kind)
    return process_memory.peak_bytes() - before
