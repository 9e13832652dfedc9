"""What all ranks together keep for the parameters of one flat parameter, collected for a state dict."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._state_dict.optim_keys import NamedHandle, StateDict, Stepped, is_stepped_unsharded
from impl.distributed.fsdp._state_dict.packing import chunked, meshed
from impl.distributed.fsdp._state_dict.redistribution import ShardPiece, chunk_of


@dataclass(frozen=True)
class OptimSaveOptions:
    """How a state dict is to be saved."""

    is_full: bool  # rather than in parts, each rank its own
    rank0_only: bool
    offloads: bool  # tensors lie on the CPU
    uses_dtensor: bool  # for parts, rather than ShardedTensor


@dataclass(frozen=True)
class TensorForm:
    """A tensor of one dimension or more, without its elements."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class RankStates:
    """What a rank tells the others of its optimizer's state."""

    rank: int  # in the world
    forms: dict[tuple[str, ...], StateDict]
    problems: list[str]


def form_of(value: Any) -> Any:
    """What other ranks need to know of a value of a state: all of it, or a tensor's form."""
    if not isinstance(value, Tensor):
        return value
    return TensorForm(value.shape, value.dtype) if value.dim() else value.detach().cpu()


def forms_of(state: StateDict) -> StateDict:
    return {name: form_of(state[name]) for name in sorted(state)}


def offloaded(state: StateDict) -> StateDict:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


@dataclass(frozen=True)
class _Item:
    """A tensor of one parameter's state, sharded as the parameter is."""

    index: int  # of the parameter in the flat parameter
    name: str
    dtype: torch.dtype


class FlatParamState:
    """What this rank keeps for one flat parameter, and what it knows of the others."""

    def __init__(
        self, one: NamedHandle, mine: dict[Stepped, StateDict], reported: Sequence[RankStates]
    ) -> None:
        self._one = one
        self._handle: FlatParamGroup = one.handle
        self._groups: Groups = one.wrapper._groups
        self._mine = {stepped.index: state for stepped, state in mine.items() if stepped.within is one}
        shard = self._groups.shard
        self._peers = [dist.get_rank()] if shard is None else dist.get_process_group_ranks(shard)
        by_rank = {other.rank: other for other in reported}
        left_out = [rank for rank in self._peers if rank not in by_rank]
        if left_out:
            raise ValueError(
                f"{one.unit.name} is sharded over ranks {self._peers}, but ranks {left_out} are not in the group that "
                "was given; give one that has all of them"
            )
        self._reported = [by_rank[rank] for rank in self._peers]

    def collected(self, options: OptimSaveOptions, destination: int) -> dict[str, StateDict]:
        """By name; nothing where the destination alone is to have it and this rank is another."""
        handle, names = self._handle, self._one.names
        if is_stepped_unsharded(self._one):
            copied = offloaded if options.offloads else copy.copy
            return {names[index]: self._shown(index, copied(state)) for index, state in self._mine.items()}
        items, states = self._merged() if handle.use_orig_params else self._own()
        tensors = (
            self._unsharded(items, options, destination) if options.is_full else self._parts(items, options)
        )
        for item, tensor in tensors:
            states[item.index][item.name] = tensor
        return {names[index]: state for index, state in states.items()}

    def _shown(self, index: int, state: StateDict) -> StateDict:
        """What has the shape of a DTensor's local tensor is a DTensor too."""
        info, shape = self._handle.param_infos[index], self._handle.layout.slots[index].shape
        if info.parallel is None:
            return state
        return {
            name: info.wrap_local(value)
            if isinstance(value, Tensor) and tuple(value.shape) == shape
            else value
            for name, value in state.items()
        }

    def _own(self) -> tuple[list[_Item], dict[int, StateDict]]:
        """Of a flat parameter: each of its parameters has a part of each tensor, and the rest alike."""
        state = self._mine[0]
        forms = forms_of(state)
        indices = range(len(self._one.names))
        sharded = {name: form for name, form in forms.items() if isinstance(form, TensorForm)}
        items = [_Item(index, name, form.dtype) for index in indices for name, form in sharded.items()]
        rest = [name for name in forms if name not in sharded]
        return items, {index: {name: own_copy(state[name]) for name in rest} for index in indices}

    def _merged(self) -> tuple[list[_Item], dict[int, StateDict]]:
        """Of parameters by themselves: a rank whose part of one is empty has no state for it, or none that counts.

        Raises:
            AssertionError: ranks differ in a number or a dtype.
            ValueError: a rank whose part is not empty lacks a tensor that others have.
        """
        items: list[_Item] = []
        states: dict[int, StateDict] = {}
        for index, name in enumerate(self._one.names):
            forms = [reported.forms.get((name,)) for reported in self._reported]
            if all(one is None for one in forms):
                continue
            dtypes = self._dtypes(index, [one or {} for one in forms])
            items += [_Item(index, state_name, dtype) for state_name, dtype in sorted(dtypes.items())]
            counting = {
                rank: one
                for rank, one in enumerate(forms)
                if one is not None and (not dtypes or self._owns(index, rank))
            }
            states[index] = _agreed_values(counting)
        return items, states

    def _owns(self, index: int, rank: int) -> bool:
        return self._handle.layout.piece(self._handle.layout.slots[index], rank) is not None

    def _dtypes(self, index: int, forms: Sequence[StateDict]) -> dict[str, torch.dtype]:
        """Of each tensor that is sharded as the parameter is."""
        found: dict[str, torch.dtype] = {}
        for state in forms:
            for name, form in state.items():
                if isinstance(form, TensorForm) and found.setdefault(name, form.dtype) != form.dtype:
                    raise AssertionError(f"Expected dtype == info.dtype, got {found[name]} != {form.dtype}")
        for rank, state in enumerate(forms):
            lacked = found.keys() - state.keys() if self._owns(index, rank) else ()
            if lacked:
                raise ValueError(
                    f"rank {self._peers[rank]} steps a part of {self._one.names[index]} but has no {sorted(lacked)} "
                    "for it, which other ranks have; step the optimizer on all ranks alike"
                )
        return found

    # Moving

    def _piece(self, item: _Item) -> Tensor | None:
        """Its part of a tensor, 1-D; None if it owns nothing of the parameter."""
        piece = self._handle.pieces[item.index]
        if piece is None:
            return None
        if self._handle.use_orig_params:
            return self._mine[item.index][item.name].reshape(-1)
        return self._mine[0][item.name].narrow(0, piece.offset, piece.numel)

    def _shard(self, items: Sequence[_Item]) -> Tensor:
        """What this rank has of one tensor of the state, [shard_numel]."""
        first = items[0]
        if not self._handle.use_orig_params:
            return self._mine[0][first.name]
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
        """One of the tensors of a state after the other, so that one is on its way at a time."""
        handle = self._handle
        alike: dict[tuple[str, torch.dtype], list[_Item]] = {}
        for item in items:
            alike.setdefault((item.name, item.dtype), []).append(item)
        for same in alike.values():
            shard = self._shard(same)
            if options.rank0_only and self._groups.shard is not None:
                unsharded = self._gathered_at(destination, shard, self._groups.shard)
            else:
                unsharded = handle.gather_like(shard, self._one.unit.name)
            if unsharded is not None:
                views = handle.wrap_locals(
                    handle.views_of(unsharded.cpu() if options.offloads else unsharded)
                )
                yield from ((item, views[item.index]) for item in same)

    def _gathered_at(self, destination: int, shard: Tensor, group: dist.ProcessGroup) -> Tensor | None:
        """All elements [padded_numel] on the destination, None elsewhere; nothing is sent among ranks without it."""
        if destination not in self._peers:
            return None
        layout = self._handle.layout
        mine = shard.to(self._handle.device)
        unsharded = mine.new_empty(layout.padded_numel) if dist.get_rank() == destination else None
        parts = None if unsharded is None else [*unsharded.split(layout.shard_numel)]

        def issue(group: dist.ProcessGroup, given: Tensor) -> Any:
            return dist.gather(given, parts, dst=destination, group=group, async_op=True)

        self._groups.order_checkers[group].run(f"collected '{self._one.unit.name}'", issue, group, mine)
        return unsharded

    def _parts(self, items: Sequence[_Item], options: OptimSaveOptions) -> Iterator[tuple[_Item, Tensor]]:
        """The rank's rows of each tensor, as a ShardedTensor or DTensor."""
        if self._handle.is_sharded:
            sharded = [ShardPiece(item.index, item.dtype, self._piece(item)) for item in items]
            chunks = self._one.redistribution().chunks_from(sharded)
        else:
            chunks = [self._own_chunk(item) for item in items]
        for item, chunk in zip(items, chunks, strict=True):
            yield item, self._packed(item, chunk, options)

    def _own_chunk(self, item: _Item) -> Tensor:
        """Of a tensor that every rank has all of."""
        wrapper = self._one.wrapper
        unsharded = self._handle.views_of(self._mine[0][item.name])[item.index]
        chunk = chunk_of(self._handle.layout.slots[item.index], wrapper.rank, wrapper.world_size)
        return unsharded.narrow(0, chunk.first_row, chunk.shape[0]).clone()

    def _packed(self, item: _Item, chunk: Tensor, options: OptimSaveOptions) -> Tensor:
        wrapper, layout = self._one.wrapper, self._handle.layout
        slot = layout.slots[item.index]
        if options.uses_dtensor:
            made: Tensor = meshed(chunk, slot, wrapper._mesh, self._handle.param_infos[item.index].parallel)
            return made.cpu() if options.offloads else made
        over_all = replace(layout, world=wrapper.world_size)
        return chunked(chunk.cpu() if options.offloads else chunk, slot, over_all, wrapper.process_group)


def own_copy(value: Any) -> Any:
    """A number by itself, or a list of them: optimizers count up, and append, in place."""
    return tree_map_only(Tensor, lambda one: one.detach().clone(), value)


def hides_tensors(value: Any) -> bool:
    """Whether it is a container of tensors that are more than a number: whether those are sharded nobody can tell."""
    if isinstance(value, (Tensor, TensorForm)):
        return False
    leaves = tree_leaves(value)
    return any(isinstance(one, TensorForm) or (isinstance(one, Tensor) and one.dim() > 0) for one in leaves)


def _agreed_values(forms: dict[int, StateDict]) -> StateDict:
    """What is no sharded tensor, of ranks that should have the same.

    Raises:
        AssertionError: they do not.
    """
    agreed: StateDict = {}
    for rank, state in forms.items():
        for name, value in state.items():
            if isinstance(value, TensorForm):
                continue
            known = agreed.setdefault(name, value)
            if not _are_equal(known, value):
                raise AssertionError(
                    f"Rank {rank} has different values for {name}: {value}. Other ranks: {known}"
                )
    return agreed


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one == other
