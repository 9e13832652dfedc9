"""Mirrors `torch.distributed.checkpoint.state_dict`: torch's functions, with fewer, larger gathers of full states."""

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
    """Return the model's state by torch's function. Full states of `fully_shard` models need fewer and larger gathers.

    Args:
        model: any module, sharded or not.
        submodules: deprecated in torch.
        options: torch's options.

    Returns:
        The state by name. With `full_state_dict` its tensors are full. With `cpu_offload` too, they are on the CPU,
        and only the first rank has them.
    Raises:
        ValueError, RuntimeError: like torch's function.
    Sync: with cpu_offload on an accelerator. Collectives: for a full state an all-gather for each 64 MiB; torch's for
        tensors that several mesh dimensions shard.
    Source: torch.distributed.checkpoint.state_dict.get_model_state_dict 2.13; differences: none.

    >>> list(get_model_state_dict(nn.Linear(2, 2)))
    ['weight', 'bias']
    """
    shard_options = _options_for_shards(model, options)
    state = torchs_model_state(model, submodules=submodules, options=shard_options or options)
    return state if shard_options is None else _full_state(state, options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the optimizers' state by parameter name, in the form of `get_model_state_dict`.

    Units of `fully_shard` are resharded first, as by `state_dict()`.

    Raises:
        ValueError, RuntimeError: what torch's raises.
    Sync and collectives: as of `get_model_state_dict`.
    Source: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict 2.13; differences: torch raises KeyError if
        a unit is unsharded.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> sorted(get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))["state"]["bias"])
    ['exp_avg', 'exp_avg_sq', 'step']
    """
    _reshard(model)
    shard_options = _options_for_shards(model, options)
    state: Any = torchs_optimizer_state(
        model, optimizers, submodules=submodules, options=shard_options or options
    )
    return state if shard_options is None else _full_state(state, options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of the model and of its optimizers, in the form of the two functions above.

    Raises:
        ValueError, RuntimeError: what torch's raises.
    Sync and collectives: as of `get_model_state_dict`.
    Source: torch.distributed.checkpoint.state_dict.get_state_dict 2.13; differences: torch raises KeyError if a unit is
        unsharded.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> [sorted(state) for state in get_state_dict(model, torch.optim.SGD(model.parameters()))]
    [['bias', 'weight'], ['param_groups', 'state']]
    """
    _reshard(model)
    shard_options = _options_for_shards(model, options)
    states: Any = torchs_state(model, optimizers, submodules=submodules, options=shard_options or options)
    return (
        states
        if shard_options is None
        else (_full_state(states[0], options), _full_state(states[1], options))
    )


def _reshard(model: nn.Module) -> None:
    """Register the parameters that optimizers have, by which torch's functions look up names."""
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            state.reshard()


def _options_for_shards(model: nn.Module, options: StateDictOptions | None) -> StateDictOptions | None:
    """Return options with which torch returns the shards, or None to call torch with the user's options."""
    if options is None or not options.full_state_dict:
        return None
    modules = list(model.modules())
    is_ours = any(state_of(module) is not None for module in modules)
    if not is_ours or any(isinstance(module, FullyShardedDataParallel) for module in modules):
        return None
    return replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)


def _full_state(shard_options: dict[str, Any], options: StateDictOptions | None) -> dict[str, Any]:
    offloads = options is not None and options.cpu_offload
    is_dropped = offloads and dist.get_rank() != 0

    def keep(full: Tensor) -> Tensor:
        if is_dropped:
            return full.new_empty(0)
        return full.cpu() if offloads else full

    # torch's function processes the remaining DTensors, checks values, and drops what other ranks do not keep.
    state = with_full_tensors(shard_options, keep)
    return _gather_state_dict(state, cpu_offload=offloads, ranks_only=(0,) if offloads else ())
