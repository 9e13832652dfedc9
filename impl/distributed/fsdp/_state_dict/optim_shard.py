"""What a state dict holds for the parameters of one flat parameter, sharded over the ranks as the flat parameter is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._layout.flat_slots import Slot
from impl.distributed.fsdp._params.tensor_parallel import root_mesh_of
from impl.distributed.fsdp._state_dict.optim_flat import TensorForm, hides_tensors, own_copy
from impl.distributed.fsdp._state_dict.optim_keys import NamedHandle, StateDict
from impl.distributed.fsdp._state_dict.packing import dtype_of, rows_in, shape_of, unsharded_in
from impl.distributed.fsdp._state_dict.redistribution import ShardChunk, chunk_of, laid_out_as


@dataclass(frozen=True)
class Scatter:
    """The first rank of a group has every tensor; `owners` says whose part of the parameter each rank of it has."""

    group: dist.ProcessGroup | None
    owners: Sequence[int]


def is_in_parts(value: Any) -> bool:
    """Whether each rank has some rows of it."""
    return isinstance(value, (ShardedTensor, DTensor))


def is_sharded(value: Any) -> bool:
    return isinstance(value, TensorForm) or (isinstance(value, Tensor) and len(shape_of(value)) > 0)


class FlatParamLoad:
    """States of a handle's parameters by their number in it; of a tensor that another rank has there is the form."""

    def __init__(self, one: NamedHandle, states: dict[int, StateDict]) -> None:
        self._one = one
        self._handle: FlatParamGroup = one.handle
        self._states = states

    def check(self) -> None:
        """
        Raises:
            ValueError: a tensor is not shaped like its parameter, or within a list; or the states of parameters that an
                optimizer steps as one do not fit together.
        """
        for index, state in self._states.items():
            hiding = next((name for name, value in state.items() if hides_tensors(value)), None)
            if hiding is not None:
                raise ValueError(
                    f"{hiding!r} of {self._one.names[index]} is a {type(state[hiding]).__name__} with tensors in it, "
                    "which cannot be sharded over the ranks; keep each tensor under a name of its own"
                )
        for index, name, value in self._tensors():
            slot, parallel = self._handle.layout.slots[index], self._handle.param_infos[index].parallel
            shape = parallel.shape if parallel else torch.Size(slot.shape)
            if shape_of(value) != shape:
                error = ValueError(
                    "Tensor optimizer state does not have same shape as its parameter: "
                    f"{torch.Size(shape_of(value))} {shape}"
                )
                error.add_note(f"rank {dist.get_rank()}: {name!r} of {self._one.names[index]}")
                raise error
        if not self._handle.use_orig_params:
            refuse_unlike(self._one.names, self._states)

    def sharded(self, scatter: Scatter | None) -> dict[int, StateDict]:
        """Its part of them, in memory of its own: of a flat parameter one state, else one of each that it owns some of.

        Collectives: with `scatter` one for each of the tensors of a state; else one for all that are ShardedTensor or
            DTensor.
        """
        pieces = dict(self._scattered(scatter) if scatter else self._local())
        if not self._handle.use_orig_params:
            return {0: self._copied_in(pieces)}
        return {
            index: {
                name: pieces[index, name] if is_sharded(value) else own_copy(value)
                for name, value in state.items()
            }
            for index, state in self._states.items()
            if self._handle.pieces[index] is not None
        }

    def _tensors(self) -> Iterator[tuple[int, str, Any]]:
        for index in sorted(self._states):
            for name in sorted(self._states[index]):
                value = self._states[index][name]
                if is_sharded(value):
                    yield index, name, value

    def _copied_in(self, pieces: dict[tuple[int, str], Tensor]) -> StateDict:
        """On the CPU until an optimizer loads them; zeros stand for parameters without the tensor."""
        joined: StateDict = {}
        shards: dict[str, list[Tensor | None]] = {}
        for (index, name), piece in pieces.items():
            if name not in joined:
                joined[name] = torch.zeros(self._handle.layout.shard_numel, dtype=piece.dtype, device="cpu")
                shards[name] = self._handle.pieces_of(joined[name])
            place = shards[name][index]
            if place is not None:
                place.copy_(piece)
        first = next(iter(self._states.values()))
        return joined | {name: own_copy(value) for name, value in first.items() if name not in joined}

    # Moving

    def _local(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        held: dict[tuple[int, str], ShardChunk] = {}
        for index, name, value in self._tensors():
            chunk = self._chunk_in(value, index) if self._handle.is_sharded else None
            if chunk is not None:
                held[index, name] = ShardChunk(index, chunk)
            else:
                unsharded = unsharded_of(value, self._one, index)
                yield (index, name), self._piece_of(unsharded, index).clone()
        if held:
            pieces = self._one.redistribution().pieces_from([*held.values()])
            yield from zip(held, pieces, strict=True)

    def _chunk_in(self, value: Tensor, index: int) -> Tensor | None:
        """The rows that this rank has of a tensor, if all ranks have those that `chunk_of` gives them."""
        slot, parallel = self._handle.layout.slots[index], self._handle.param_infos[index].parallel
        mesh = self._one.wrapper._device_mesh
        if (
            isinstance(value, DTensor)
            and mesh is not None
            and mesh != root_mesh_of(mesh) == value.device_mesh
        ):
            return rows_in(value, slot, mesh, parallel)
        return _chunk_in(value, slot, self._handle) if parallel is None else None

    def _piece_of(self, unsharded: Tensor, index: int) -> Tensor:
        """Its part of a tensor in the parameter's shape; all of it where nothing is sharded."""
        handle = self._handle
        if not handle.is_sharded:
            return unsharded
        slot, piece = handle.layout.slots[index], handle.pieces[index]
        if piece is None:
            return unsharded.new_empty(0)
        start = handle.rank * handle.layout.shard_numel + piece.offset - slot.start
        return laid_out_as(unsharded, slot).as_strided((slot.numel,), (1,)).narrow(0, start, piece.numel)

    def _scattered(self, scatter: Scatter) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """One of the tensors of a state after the other, so that one is on its way at a time."""
        handle, layout = self._handle, self._handle.layout
        alike: dict[tuple[str, torch.dtype], dict[int, Any]] = {}
        for index, name, value in self._tensors():
            alike.setdefault((name, dtype_of(value)), {})[index] = value
        for (name, dtype), values in alike.items():
            mine = torch.empty(layout.shard_numel, dtype=dtype, device=handle.device)
            lots = None
            if dist.get_rank(scatter.group) == 0:
                unsharded = torch.zeros(layout.padded_numel, dtype=dtype, device=handle.device)
                views = handle.views_of(unsharded)
                for index, value in values.items():
                    views[index].copy_(value)
                parts = unsharded.split(layout.shard_numel)
                lots = [parts[owner] for owner in scatter.owners]
            dist.scatter(mine, lots, group=scatter.group, group_src=0)
            places = handle.pieces_of(mine)
            for index in values:
                place = places[index]
                yield (index, name), mine.new_empty(0) if place is None else place.clone()


def unsharded_of(value: Tensor, one: NamedHandle, index: int) -> Tensor:
    """All that the unit shards of a tensor in a parameter's shape.

    Raises:
        ValueError: the parameter is a DTensor, and the tensor is none.
    Collectives: as of `full_tensor_of`; of a DTensor over the ranks of tensor parallelism none.
    """
    parallel = one.handle.param_infos[index].parallel
    if parallel is None:
        return full_tensor_of(value, one.handle.device)
    if not isinstance(value, DTensor):
        raise ValueError(
            f"the state of {one.names[index]} is a {type(value).__name__}, but the parameter a DTensor over "
            f"{parallel.mesh}; torch.distributed.tensor.distribute_tensor makes one of an unsharded tensor"
        )
    return unsharded_in(value, one.wrapper._mesh, parallel)


def full_tensor_of(value: Tensor, device: torch.device) -> Tensor:
    """All of a tensor of any kind.

    Args:
        device: where the ranks compute; one that is in parts comes from there, wherever a rank has its own, if any.

    Collectives: of a DTensor or ShardedTensor an all-gather over the ranks that have a part of it.
    """
    if isinstance(value, DTensor):
        parts: DTensor = value.to(value.device_mesh.device_type)  # pyright: ignore[reportAssignmentType]  Tensor's stub
        return parts.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value.detach()
    group = value._process_group
    rows, *rest = shape_of(value)
    width = -(-rows // group.size())
    mine = torch.zeros(width, *rest, dtype=dtype_of(value), device=device)
    for shard in value.local_shards():
        mine[: shard.tensor.shape[0]].copy_(shard.tensor)
    unsharded = mine.new_empty(width * group.size(), *rest)
    dist.all_gather([*unsharded.split(width)], mine, group=group)
    return unsharded[:rows]


def _chunk_in(value: Tensor, slot: Slot, handle: FlatParamGroup) -> Tensor | None:
    """The rows that this rank has of a tensor, if all ranks have those that `chunk_of` gives them."""
    world = handle.layout.world
    if isinstance(value, DTensor):
        *outer, inner = value.placements
        is_chunked = inner == Shard(0) and all(one == Replicate() for one in outer)
        return value.to_local() if is_chunked and value.device_mesh.size(-1) == world else None
    if not isinstance(value, ShardedTensor):
        return None
    sizes = [one.shard_sizes[0] for one in value.metadata().shards_metadata]
    chunks = [chunk_of(slot, rank, world).shape for rank in range(world)]
    if sizes != [shape[0] for shape in chunks if shape[0]]:
        return None
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(chunks[handle.rank], dtype=dtype_of(value))


# States of one flat parameter


def refuse_unlike(names: Sequence[str], states: dict[int, StateDict]) -> None:
    """
    Raises:
        ValueError: the states of parameters that an optimizer steps as one differ in more than the elements of tensors.
    """
    kinds = {frozenset(state) for state in states.values()}
    if len(kinds) > 1:
        raise ValueError(f"Differing optimizer state names for the unflattened parameters: {[*names]}")
    for state_name in next(iter(kinds)):
        values = [states.get(index, {}).get(state_name) for index in range(len(names))]
        if any(value is not None for value in values):
            _refuse_unlike_values(state_name, values, [*names])


def _refuse_unlike_values(state_name: str, values: list[Any], names: list[str]) -> None:
    given = [value for value in values if value is not None]
    # Some may be in parts and some unsharded, as DCP reads those of one element.
    kinds = {"sharded" if is_sharded(value) else type(value) for value in given}
    if len(kinds) > 1:
        raise ValueError(
            f"Differing optimizer state types for state {state_name}, values {given}, and unflattened parameter names "
            f"{names}"
        )
    if is_sharded(given[0]):
        dtypes = {dtype_of(value) for value in given}
        if len(dtypes) > 1:
            raise ValueError(
                "All unflattened parameters comprising a single flat parameter must have positive-dimension tensor "
                f"state with the same dtype but got dtypes {dtypes} for state {state_name} and unflattened parameter "
                f"names {names}"
            )
        return
    must = (
        "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and "
        "dtype but got values"
    )
    if isinstance(given[0], Tensor):
        numbers = {None if value is None else value.item() for value in values}
        dtypes = {None if value is None else value.dtype for value in values}
        if len(numbers) > 1 or len(dtypes) > 1:
            raise ValueError(
                f"{must} {numbers} and dtypes {dtypes} for state {state_name} and unflattened parameter names {names}"
            )
    elif any(value != given[0] for value in values):
        raise ValueError(
            f"{must} {_distinct(values)} for state {state_name} and  unflattened parameter names {names}"
        )


def _distinct(values: Iterable[Any]) -> Any:
    values = list(values)
    try:
        return set(values)
    except TypeError:  # lists, which are not hashable
        return values
