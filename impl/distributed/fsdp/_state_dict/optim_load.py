"""Conversion of a saved optimizer state, with names and unsharded shapes, for the optimizer of a sharded model.

First everything is checked, without the elements that other ranks have. Invalid input raises on all ranks before
anything is communicated. Then each flat parameter gets its rank's shard. The result shares no memory with the input.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._state_dict.consensus import gather_reports
from impl.distributed.fsdp._state_dict.optim_flat_load import (
    FlatParamLoad,
    Scatter,
    full_tensor_of,
    has_rows_per_rank,
    unsharded_of,
)
from impl.distributed.fsdp._state_dict.optim_keys import (
    Key,
    NamedHandle,
    ParamNames,
    ParamSource,
    StateDict,
    Stepped,
    flattened_groups,
    is_stepped_unsharded,
)
from impl.distributed.fsdp._state_dict.optim_values import TensorMeta, describe_state_value, own_copy
from impl.distributed.fsdp._state_dict.packing import dtype_of, shape_of


class OptimStateLoading:
    """Load of one state dict into an optimizer, on one rank.

    Args:
        model: the model whose parameters the optimizer steps.
        wrappers: every FullyShardedDataParallel at and below it.
        source: source of the stepped parameters.
        state_dict: the state dict. With `rank0_only` only that of the group's first rank counts.
        named_optimizer: an optimizer whose state dict has names as keys. It keeps its states of parameters of which
            this rank has no piece.
        reports_problems: report problems to other ranks. Without it, other ranks need not take part unless tensors are
            exchanged.
    """

    def __init__(  # noqa: PLR0913  arguments of torch's functions
        self,
        model: nn.Module,
        wrappers: Sequence[Wrapper],
        source: ParamSource,
        state_dict: Any,
        *,
        rank0_only: bool = False,
        named_optimizer: Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
        reports_problems: bool = True,
    ) -> None:
        self._names = ParamNames(model, wrappers)
        self._device: torch.device = wrappers[0].compute_device
        self._source = source
        self._named_optimizer = named_optimizer
        self._group = group
        self._rank0_only = rank0_only
        self._reports_problems = reports_problems
        self._state_dict = state_dict if not rank0_only or dist.get_rank(group) == 0 else {}
        self._descriptions: Any = (
            _broadcast_descriptions(self._state_dict, group) if rank0_only else self._state_dict
        )
        self._flats: dict[NamedHandle, FlatParamLoad] = {}
        self._key_of: dict[nn.Parameter, Key] = {}
        self._groups: list[StateDict] | None = None

    @torch.no_grad()
    def run(self) -> StateDict:
        """Return the state dict for the optimizer.

        Raises:
            ValueError, KeyError, RuntimeError: the state dict does not fit the model or the optimizer.
        Collectives: over the group, one of objects if only rank 0's dict counts, and one if ranks agree; and the
            exchange of shards if other ranks have the tensors.
        """
        problem: Exception | None = None
        try:
            self._check()
        except Exception as error:
            problem = error
        scatters: dict[NamedHandle, Scatter] = {}
        if self._reports_problems:
            rows = self._row_descriptions() if problem is None else []
            reported = (rows, [named.handle.rank for named in self._names.handles])
            by_rank = gather_reports(problem, self._group, reported)
            self._check_same_rows([rows for rows, _ in by_rank])
            if self._rank0_only:
                owners = zip(*(owned for _, owned in by_rank), strict=True)
                scatters = {
                    named: Scatter(self._group, owned)
                    for named, owned in zip(self._names.handles, owners, strict=True)
                }
        elif problem is not None:
            raise problem
        return self._assemble(scatters)

    def _check(self) -> None:
        """Check the state dict against the model and the optimizer, and prepare to load it."""
        if not self._rank0_only and "state" not in self._descriptions:
            raise ValueError(
                '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict'
            )
        state: dict[Any, Any] = self._descriptions["state"]
        for named, by_index in self._states_of_handles().items():
            if not named.handle.use_orig_params and not any(by_index.values()):
                raise RuntimeError(
                    f"The state of {_as_torch_says(named.names)} is empty. This should happen when "
                    "use_orig_params=True."
                )
            self._flats[named] = FlatParamLoad(named, by_index)
            self._flats[named].check()
        by_key = self._names.keyed(self._source, self._named_optimizer is not None)
        self._key_of = {parameter: key for key, parameter in by_key.items()}
        if self._rank0_only and (rows := self._row_descriptions()):
            raise ValueError(
                f"rank0_only loads unsharded tensors of the first rank, but it has rows of {rows[:2]}"
            )
        numbers = [key for key in state if not isinstance(key, str)]
        if numbers:
            raise ValueError(
                f"the state has the keys {numbers[:3]}, but is loaded by parameters' names; "
                "FullyShardedDataParallel.rekey_optim_state_dict(…, OptimStateKeyType.PARAM_NAME, …) converts the "
                "numbers of an unwrapped model's optimizer to names"
            )
        if "param_groups" in self._descriptions:
            keys = {
                name: self._key_of[parameter]
                for parameter, stepped in self._names.stepped.items()
                if parameter in self._key_of
                for name in stepped.names
            }
            self._groups = flattened_groups(self._descriptions["param_groups"], keys)

    def _states_of_handles(self) -> dict[NamedHandle, dict[int, StateDict]]:
        """Return the states that must be sharded over the ranks, by flat parameter and index."""
        states: dict[NamedHandle, dict[int, StateDict]] = {}
        for stepped in self._names.stepped.values():
            named = stepped.named_handle
            for name in stepped.names:
                if (
                    named is not None
                    and not is_stepped_unsharded(named)
                    and name in self._descriptions["state"]
                ):
                    states.setdefault(named, {})[named.names.index(name)] = self._values[name]
        return states

    @property
    def _values(self) -> dict[Any, Any]:
        """States with the elements of their tensors, if this rank has them."""
        return self._state_dict["state"] if self._state_dict else self._descriptions["state"]

    def _row_descriptions(self) -> list[Any]:
        """Return descriptions of the tensors of which other ranks must have rows too."""
        return sorted(
            (key, name, type(value).__name__, tuple(shape_of(value)), str(dtype_of(value)))
            for key, state in self._values.items()
            if isinstance(state, dict)
            for name, value in state.items()
            if has_rows_per_rank(value)
        )

    def _check_same_rows(self, by_rank: Sequence[list[Any]]) -> None:
        first = by_rank[0]
        for rank, rows in enumerate(by_rank):
            if rows != first:
                missing = [row for row in first if row not in rows]
                added = [row for row in rows if row not in first]
                raise RuntimeError(
                    f"the optimizer's state dicts differ between ranks: rank 0 has {missing[:2]}, rank {rank} has "
                    f"{added[:2]} instead; load state dicts that were saved together. Nothing was changed on any rank"
                )

    # Assembling

    def _assemble(self, scatters: dict[NamedHandle, Scatter]) -> StateDict:
        sharded = {named: load.shard(scatters.get(named)) for named, load in self._flats.items()}
        state: dict[Any, Any] = self._descriptions["state"]
        result: dict[Any, Any] = {}
        known: set[str] = set()
        for parameter, stepped in self._names.stepped.items():
            if not any(name in state for name in stepped.names):
                continue
            known.update(stepped.names)
            loaded = self._state_of(parameter, stepped, sharded)
            if loaded is not None:
                result[self._key_of.get(parameter, stepped.names)] = loaded
        for key, description in state.items():
            if key not in known:
                result[key] = tree_map(self._fetch, description, self._values[key])
        return {"state": result} if self._groups is None else {"state": result, "param_groups": self._groups}

    def _state_of(
        self, parameter: nn.Parameter, stepped: Stepped, sharded: dict[NamedHandle, dict[int, StateDict]]
    ) -> StateDict | None:
        """Return the state of a parameter, or None if this rank owns no part of it."""
        named = stepped.named_handle
        if named is None or is_stepped_unsharded(named):
            values = self._values[stepped.name]
            if named is not None and named.handle.param_infos[stepped.index].parallel is not None:
                values = tree_map_only(
                    DTensor, partial(unsharded_of, named=named, index=stepped.index), values
                )
            loaded = tree_map(
                partial(self._fetch, parameter=parameter), self._descriptions["state"][stepped.name], values
            )
        else:
            loaded = sharded[named].get(stepped.index)
        if loaded or named is None:
            return loaded
        if self._named_optimizer is None:
            return None
        own_state = self._named_optimizer.state.get(parameter)
        if own_state is None:
            warnings.warn(
                f"optim_state[{_as_torch_says(stepped.names)}] is not on rank{named.wrapper.rank}.",
                stacklevel=6,
            )
        return copy.deepcopy(own_state)

    def _fetch(self, description: Any, value: Any, parameter: nn.Parameter | None = None) -> Any:
        """Return a copy of a value that is not sharded here. Broadcast it if only the first rank has it."""
        if isinstance(description, TensorMeta):
            # A broadcast sends elements in the order of memory, so every rank needs the same memory layout.
            received = torch.empty(description.shape, dtype=description.dtype, device=self._device)
            if isinstance(value, Tensor):
                received.copy_(value.detach())
            dist.broadcast(received, group=self._group, group_src=0)
            return received if parameter is None else _with_layout_of(parameter, received)
        return own_copy(full_tensor_of(value, self._device)) if isinstance(value, Tensor) else value


def _with_layout_of(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """Return a tensor in the memory layout in which optimizers create states of `parameter`'s shape."""
    if tensor.shape != parameter.shape or parameter.is_contiguous():
        return tensor
    dims = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return torch.empty_permuted(tensor.shape, dims, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _as_torch_says(names: Sequence[str]) -> str:
    return f"_OptimStateKey(unflat_param_names={tuple(names)}, is_fsdp_managed=True)"


def _broadcast_descriptions(state_dict: Any, group: dist.ProcessGroup | None) -> Any:
    """Broadcast the state dict of the group's first rank, without the elements of tensors."""
    descriptions = [tree_map(describe_state_value, state_dict)]
    dist.broadcast_object_list(descriptions, group=group, group_src=0)
    return descriptions[0]


def load_on_all_ranks(optim: Optimizer, state_dict: StateDict, group: dist.ProcessGroup | None) -> None:
    """Load the state dict into the optimizer: on all ranks, or if one raises, on none."""
    previous = {"state": optim.state, "param_groups": optim.param_groups}
    problem: Exception | None = None
    try:
        optim.load_state_dict(state_dict)
    except Exception as error:
        problem = error
    try:
        gather_reports(problem, group)
    except Exception:
        vars(optim).update(previous)
        raise
