"""Mirrors `torch.distributed.checkpoint.state_dict`: torch's helpers, but for how full states are put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict as torchs_model_state
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs_optimizer_state
from torch.distributed.checkpoint.state_dict import get_state_dict as torchs_state
from torch.optim import Optimizer

from impl.distributed.checkpoint._full_tensors import with_full_tensors
from impl.distributed.fsdp._fully_shard.module_state import state_of
from impl.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"]


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The model's state, by torch's function; the full one of a model of `fully_shard` by fewer and larger gathers.

    Args:
        model: sharded or not.
        submodules: deprecated in torch.
        options: torch's.

    Returns:
        By name; with `full_state_dict` full tensors, with `cpu_offload` too on the first rank alone, on the CPU.
    Raises:
        ValueError, RuntimeError: what torch's raises.
    Sync: with cpu_offload on an accelerator. Collectives: of a full state an all-gather for each 64 MiB; torch's for
        tensors that several dimensions of a mesh cut.
    Source: torch.distributed.checkpoint.state_dict.get_model_state_dict 2.13; differences: none.

    >>> list(get_model_state_dict(nn.Linear(2, 2)))
    ['weight', 'bias']
    """
    parts = _options_of_parts(model, options)
    found = torchs_model_state(model, submodules=submodules, options=parts or options)
    return found if parts is None else _full_state(found, options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The optimizers' state by the names of the model's parameters, as `get_model_state_dict` gives the model's.

    Raises:
        ValueError, RuntimeError: what torch's raises.
    Sync and collectives: as of `get_model_state_dict`.
    Source: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict 2.13; differences: none.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> sorted(get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))["state"]["bias"])
    ['exp_avg', 'exp_avg_sq', 'step']
    """
    parts = _options_of_parts(model, options)
    found: Any = torchs_optimizer_state(model, optimizers, submodules=submodules, options=parts or options)
    return found if parts is None else _full_state(found, options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of the model and of its optimizers, as the two functions above give them.

    Raises:
        ValueError, RuntimeError: what torch's raises.
    Sync and collectives: as of `get_model_state_dict`.
    Source: torch.distributed.checkpoint.state_dict.get_state_dict 2.13; differences: none.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> [sorted(state) for state in get_state_dict(model, torch.optim.SGD(model.parameters()))]
    [['bias', 'weight'], ['param_groups', 'state']]
    """
    parts = _options_of_parts(model, options)
    found: Any = torchs_state(model, optimizers, submodules=submodules, options=parts or options)
    return found if parts is None else (_full_state(found[0], options), _full_state(found[1], options))


def _options_of_parts(model: nn.Module, options: StateDictOptions | None) -> StateDictOptions | None:
    """Those by which torch gives the parts of the full state; None if they are not ours to put together."""
    if options is None or not options.full_state_dict:
        return None
    modules = list(model.modules())
    is_ours = any(state_of(module) is not None for module in modules)
    if not is_ours or any(isinstance(module, FullyShardedDataParallel) for module in modules):
        return None
    return replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)


def _full_state(parts: dict[str, Any], options: StateDictOptions | None) -> dict[str, Any]:
    offloads = options is not None and options.cpu_offload
    is_dropped = offloads and dist.get_rank() != 0

    def keep(full: Tensor) -> Tensor:
        if is_dropped:
            return full.new_empty(0)
        return full.cpu() if offloads else full

    # torch's own goes on with what is left of DTensors, checks values, and drops what other ranks do not keep.
    state = with_full_tensors(parts, keep)
    return _gather_state_dict(state, cpu_offload=offloads, ranks_only=(0,) if offloads else ())
