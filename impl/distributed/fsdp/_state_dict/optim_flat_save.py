"""Collection of all ranks' optimizer states for the parameters of one flat parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._state_dict.optim_keys import NamedHandle, StateDict, Stepped, is_stepped_unsharded
from impl.distributed.fsdp._state_dict.optim_values import TensorMeta, describe_state, offload, own_copy
from impl.distributed.fsdp._state_dict.packing import dtensor_of_rows, sharded_tensor_of_rows
from impl.distributed.fsdp._state_dict.redistribution import ShardPiece, chunk_of


@dataclass(frozen=True)
class OptimSaveOptions:
    """Settings of a saved state dict."""

    is_full: bool  # unsharded tensors, not each rank's rows
    rank0_only: bool
    offloads: bool  # tensors on the CPU
    uses_dtensor: bool  # rows as DTensor, not as ShardedTensor


@dataclass(frozen=True)
class RankStates:
    """Description of a rank's optimizer state for the other ranks."""

    rank: int  # global rank
    descriptions: dict[tuple[str, ...], StateDict]
    problems: list[str]


@dataclass(frozen=True)
class _Item:
    """A tensor of one parameter's state, sharded as the parameter is."""

    index: int  # index of the parameter in the flat parameter
    name: str
    dtype: torch.dtype


class FlatParamState:
    """State that this rank has for one flat parameter, with descriptions of the other ranks' states."""

    def __init__(
        self, named: NamedHandle, states: dict[Stepped, StateDict], reported: Sequence[RankStates]
    ) -> None:
        self._named = named
        self._handle: FlatParamGroup = named.handle
        self._groups: Groups = named.wrapper._groups
        self._states = {
            stepped.index: state for stepped, state in states.items() if stepped.named_handle is named
        }
        shard = self._groups.shard
        self._peers = [dist.get_rank()] if shard is None else dist.get_process_group_ranks(shard)
        by_rank = {other.rank: other for other in reported}
        missing_ranks = [rank for rank in self._peers if rank not in by_rank]
        if missing_ranks:
            raise ValueError(
                f"{named.unit.name} is sharded over ranks {self._peers}, but ranks {missing_ranks} are not in `group`; "
                "pass a group that contains all of them"
            )
        self._reported = [by_rank[rank] for rank in self._peers]

    def collect(self, options: OptimSaveOptions, destination: int) -> dict[str, StateDict]:
        """Return the states by name. With `rank0_only`, only the destination gets the gathered tensors."""
        handle, names = self._handle, self._named.names
        if is_stepped_unsharded(self._named):
            copy_state = offload if options.offloads else copy.copy
            return {
                names[index]: self._wrap_locals(index, copy_state(state))
                for index, state in self._states.items()
            }
        items, states = self._merge_ranks() if handle.use_orig_params else self._of_flat_param()
        tensors = (
            self._unsharded(items, options, destination) if options.is_full else self._rows(items, options)
        )
        for item, tensor in tensors:
            states[item.index][item.name] = tensor
        return {names[index]: state for index, state in states.items()}

    def _wrap_locals(self, index: int, state: StateDict) -> StateDict:
        """Return the state with DTensors instead of tensors that have the shape of a DTensor's local tensor."""
        info, shape = self._handle.param_infos[index], self._handle.layout.slots[index].shape
        if info.parallel is None:
            return state
        return {
            name: info.wrap_local(value)
            if isinstance(value, Tensor) and tuple(value.shape) == shape
            else value
            for name, value in state.items()
        }

    def _of_flat_param(self) -> tuple[list[_Item], dict[int, StateDict]]:
        """Return the tensors and the other values of a flat parameter's own state.

        Each of its parameters has a piece of each tensor, and the same other values.
        """
        state = self._states[0]
        descriptions = describe_state(state)
        indices = range(len(self._named.names))
        sharded = {
            name: description
            for name, description in descriptions.items()
            if isinstance(description, TensorMeta)
        }
        items = [
            _Item(index, name, description.dtype)
            for index in indices
            for name, description in sharded.items()
        ]
        rest = [name for name in descriptions if name not in sharded]
        return items, {index: {name: own_copy(state[name]) for name in rest} for index in indices}

    def _merge_ranks(self) -> tuple[list[_Item], dict[int, StateDict]]:
        """Return the tensors and the other values of original parameters, merged over the ranks.

        A rank with an empty piece of a parameter has no state for it, or one that does not count.

        Raises:
            AssertionError: ranks differ in a number or a dtype.
            ValueError: a rank with a piece lacks a tensor that others have.
        """
        items: list[_Item] = []
        states: dict[int, StateDict] = {}
        for index, name in enumerate(self._named.names):
            descriptions = [reported.descriptions.get((name,)) for reported in self._reported]
            if all(description is None for description in descriptions):
                continue
            dtypes = self._dtypes(index, [description or {} for description in descriptions])
            items += [_Item(index, state_name, dtype) for state_name, dtype in sorted(dtypes.items())]
            complete = {
                rank: description
                for rank, description in enumerate(descriptions)
                if description is not None and (not dtypes or self._owns(index, rank))
            }
            states[index] = _agreed_values(complete)
        return items, states

    def _owns(self, index: int, rank: int) -> bool:
        return self._handle.layout.piece(self._handle.layout.slots[index], rank) is not None

    def _dtypes(self, index: int, descriptions: Sequence[StateDict]) -> dict[str, torch.dtype]:
        """Return the dtype of each tensor that is sharded like the parameter."""
        dtypes: dict[str, torch.dtype] = {}
        for state in descriptions:
            for name, description in state.items():
                if (
                    isinstance(description, TensorMeta)
                    and dtypes.setdefault(name, description.dtype) != description.dtype
                ):
                    raise AssertionError(
                        f"Expected dtype == info.dtype, got {dtypes[name]} != {description.dtype}"
                    )
        for rank, state in enumerate(descriptions):
            lacked = dtypes.keys() - state.keys() if self._owns(index, rank) else ()
            if lacked:
                raise ValueError(
                    f"rank {self._peers[rank]} steps a piece of {self._named.names[index]} but has no {sorted(lacked)} "
                    "for it, which other ranks have; step the optimizer on every rank"
                )
        return dtypes

    # Moving

    def _piece(self, item: _Item) -> Tensor | None:
        """Return this rank's 1-D piece of a tensor, or None if it owns no part of the parameter."""
        piece = self._handle.pieces[item.index]
        if piece is None:
            return None
        if self._handle.use_orig_params:
            return self._states[item.index][item.name].reshape(-1)
        return self._states[0][item.name].narrow(0, piece.offset, piece.numel)

    def _shard(self, items: Sequence[_Item]) -> Tensor:
        """Return this rank's shard [shard_numel] of one tensor of the state."""
        first = items[0]
        if not self._handle.use_orig_params:
            return self._states[0][first.name]
        shard = torch.zeros(self._handle.layout.shard_numel, dtype=first.dtype, device=self._handle.device)
        places = self._handle.pieces_of(shard)
        for item in items:
            place, piece = places[item.index], self._piece(item)
            if place is not None and piece is not None:
                place.copy_(piece)
        return shard

    def _unsharded(
        self, items: Sequence[_Item], options: OptimSaveOptions, destination: int
    ) -> Iterator[tuple[_Item, Tensor]]:
        """Yield the unsharded tensors of a state one after the other, so that only one is communicated at a time."""
        handle = self._handle
        alike: dict[tuple[str, torch.dtype], list[_Item]] = {}
        for item in items:
            alike.setdefault((item.name, item.dtype), []).append(item)
        for tensor_items in alike.values():
            shard = self._shard(tensor_items)
            if options.rank0_only and self._groups.shard is not None:
                unsharded = self._gather_at(destination, shard, self._groups.shard)
            else:
                unsharded = handle.gather_like(shard, self._named.unit.name)
            if unsharded is not None:
                views = handle.wrap_locals(
                    handle.views_of(unsharded.cpu() if options.offloads else unsharded)
                )
                yield from ((item, views[item.index]) for item in tensor_items)

    def _gather_at(self, destination: int, shard: Tensor, group: dist.ProcessGroup) -> Tensor | None:
        """Return all elements [padded_numel] on the destination, None elsewhere.

        Groups without the destination exchange nothing.
        """
        if destination not in self._peers:
            return None
        layout = self._handle.layout
        local = shard.to(self._handle.device)
        unsharded = local.new_empty(layout.padded_numel) if dist.get_rank() == destination else None
        shards = None if unsharded is None else [*unsharded.split(layout.shard_numel)]

        def issue(group: dist.ProcessGroup, tensor: Tensor) -> Any:
            return dist.gather(tensor, shards, dst=destination, group=group, async_op=True)

        self._groups.order_checkers[group].run(f"collected '{self._named.unit.name}'", issue, group, local)
        return unsharded

    def _rows(self, items: Sequence[_Item], options: OptimSaveOptions) -> Iterator[tuple[_Item, Tensor]]:
        """Yield the rank's rows of each tensor, as a ShardedTensor or DTensor."""
        if self._handle.is_sharded:
            sharded = [ShardPiece(item.index, item.dtype, self._piece(item)) for item in items]
            chunks = self._named.redistribution().chunks_from(sharded)
        else:
            chunks = [self._own_chunk(item) for item in items]
        for item, chunk in zip(items, chunks, strict=True):
            yield item, self._pack(item, chunk, options)

    def _own_chunk(self, item: _Item) -> Tensor:
        """Return this rank's rows of a tensor that every rank has completely."""
        wrapper = self._named.wrapper
        unsharded = self._handle.views_of(self._states[0][item.name])[item.index]
        chunk = chunk_of(self._handle.layout.slots[item.index], wrapper.rank, wrapper.world_size)
        return unsharded.narrow(0, chunk.first_row, chunk.shape[0]).clone()

    def _pack(self, item: _Item, chunk: Tensor, options: OptimSaveOptions) -> Tensor:
        wrapper, layout = self._named.wrapper, self._handle.layout
        slot = layout.slots[item.index]
        parallel = self._handle.param_infos[item.index].parallel
        # A ShardedTensor has no place for the ranks that tensor parallelism shards over.
        if options.uses_dtensor or parallel is not None:
            dtensor: Tensor = dtensor_of_rows(chunk, slot, wrapper._mesh, parallel)
            return dtensor.cpu() if options.offloads else dtensor
        over_all = replace(layout, world=wrapper.world_size)
        return sharded_tensor_of_rows(
            chunk.cpu() if options.offloads else chunk, slot, over_all, wrapper.process_group
        )


def _agreed_values(descriptions: dict[int, StateDict]) -> StateDict:
    """Return the values other than sharded tensors, which must be the same on all ranks.

    Raises:
        AssertionError: ranks have different values.
    """
    agreed: StateDict = {}
    for rank, state in descriptions.items():
        for name, value in state.items():
            if isinstance(value, TensorMeta):
                continue
            known = agreed.setdefault(name, value)
            if not _are_equal(known, value):
                raise AssertionError(
                    f"Rank {rank} has different values for {name}: {value}. Other ranks: {known}"
                )
    return agreed


def _are_equal(value: object, other: object) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return value == other
