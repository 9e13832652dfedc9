"""Load of saved optimizer states into the shards of one flat parameter."""

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
from impl.distributed.fsdp._state_dict.optim_keys import NamedHandle, StateDict
from impl.distributed.fsdp._state_dict.optim_values import TensorMeta, hides_tensors, own_copy
from impl.distributed.fsdp._state_dict.packing import dtype_of, is_part, rows_in, shape_of, unsharded_in
from impl.distributed.fsdp._state_dict.redistribution import ShardChunk, chunk_of, elements_of


@dataclass(frozen=True)
class Scatter:
    """Scatter from the first rank, which has every tensor. `owners` has the index of each rank's shard."""

    group: dist.ProcessGroup | None
    owners: Sequence[int]


def has_rows_per_rank(value: object) -> bool:
    """Return whether each rank has some rows of the value."""
    return isinstance(value, (ShardedTensor, DTensor))


def is_sharded(value: object) -> bool:
    return isinstance(value, TensorMeta) or (isinstance(value, Tensor) and len(shape_of(value)) > 0)


class FlatParamLoad:
    """States of a flat parameter's parameters, by index.

    A tensor that another rank has is represented by its metadata.
    """

    def __init__(self, named: NamedHandle, states: dict[int, StateDict]) -> None:
        self._named = named
        self._handle: FlatParamGroup = named.handle
        self._states = states

    def check(self) -> None:
        """Check the states against the parameters.

        Raises:
            ValueError: a tensor has another shape than its parameter, or is inside a list; or the states of parameters
                that an optimizer steps as one differ.
        """
        for index, state in self._states.items():
            hiding = next((name for name, value in state.items() if hides_tensors(value)), None)
            if hiding is not None:
                raise ValueError(
                    f"{hiding!r} of {self._named.names[index]} is a {type(state[hiding]).__name__} with tensors in it, "
                    "which cannot be sharded over the ranks; keep each tensor under its own name"
                )
        for index, name, value in self._tensors():
            shape = self._handle.global_shape(index)
            if shape_of(value) != shape:
                error = ValueError(
                    "Tensor optimizer state does not have same shape as its parameter: "
                    f"{torch.Size(shape_of(value))} {shape}"
                )
                error.add_note(f"rank {dist.get_rank()}: {name!r} of {self._named.names[index]}")
                raise error
        if not self._handle.use_orig_params:
            check_states_agree(self._named.names, self._states)

    def shard(self, scatter: Scatter | None) -> dict[int, StateDict]:
        """Return copies of this rank's shards: one state of the flat parameter, or one per parameter with a piece.

        Collectives: with `scatter` one for each tensor of a state, else one for all that are ShardedTensor or DTensor.
        """
        pieces = dict(self._scatter(scatter) if scatter else self._local())
        if not self._handle.use_orig_params:
            return {0: self._fill_flat_state(pieces)}
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

    def _fill_flat_state(self, pieces: dict[tuple[int, str], Tensor]) -> StateDict:
        """Return the state of the flat parameter, on the CPU until an optimizer loads it.

        Missing tensors become zeros.
        """
        flat_state: StateDict = {}
        shards: dict[str, list[Tensor | None]] = {}
        for (index, name), piece in pieces.items():
            if name not in flat_state:
                flat_state[name] = torch.zeros(
                    self._handle.layout.shard_numel, dtype=piece.dtype, device="cpu"
                )
                shards[name] = self._handle.pieces_of(flat_state[name])
            place = shards[name][index]
            if place is not None:
                place.copy_(piece)
        first = next(iter(self._states.values()))
        return flat_state | {name: own_copy(value) for name, value in first.items() if name not in flat_state}

    # Moving

    def _local(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        chunks: dict[tuple[int, str], ShardChunk] = {}
        for index, name, value in self._tensors():
            chunk = self._chunk_in(value, index) if self._handle.is_sharded else None
            if chunk is not None:
                chunks[index, name] = ShardChunk(index, chunk)
            else:
                unsharded = unsharded_of(value, self._named, index)
                yield (index, name), self._piece_of(unsharded, index).clone()
        if chunks:
            pieces = self._named.redistribution().pieces_from([*chunks.values()])
            yield from zip(chunks, pieces, strict=True)

    def _chunk_in(self, value: Tensor, index: int) -> Tensor | None:
        """Return this rank's rows of a tensor, or None if the ranks have other rows than `chunk_of` gives."""
        slot, parallel = self._handle.layout.slots[index], self._handle.param_infos[index].parallel
        mesh = self._named.wrapper._device_mesh
        if (
            isinstance(value, DTensor)
            and mesh is not None
            and mesh != root_mesh_of(mesh) == value.device_mesh
        ):
            return rows_in(value, slot, mesh, parallel)
        return _chunk_in(value, slot, self._handle) if parallel is None else None

    def _piece_of(self, unsharded: Tensor, index: int) -> Tensor:
        """Return this rank's piece of a tensor in the parameter's shape, or all of it if nothing is sharded."""
        handle = self._handle
        if not handle.is_sharded:
            return unsharded
        piece = handle.pieces[index]
        if piece is None:
            return unsharded.new_empty(0)
        return elements_of(piece, unsharded, handle.layout.slots[index])

    def _scatter(self, scatter: Scatter) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """Yield the scattered tensors of a state one after the other, so that only one is communicated at a time."""
        handle, layout = self._handle, self._handle.layout
        alike: dict[tuple[str, torch.dtype], dict[int, Any]] = {}
        for index, name, value in self._tensors():
            alike.setdefault((name, dtype_of(value)), {})[index] = value
        for (name, dtype), values in alike.items():
            shard = torch.empty(layout.shard_numel, dtype=dtype, device=handle.device)
            scattered = None
            if dist.get_rank(scatter.group) == 0:
                unsharded = torch.zeros(layout.padded_numel, dtype=dtype, device=handle.device)
                views = handle.views_of(unsharded)
                for index, value in values.items():
                    views[index].copy_(value)
                sharded = unsharded.split(layout.shard_numel)
                scattered = [sharded[owner] for owner in scatter.owners]
            dist.scatter(shard, scattered, group=scatter.group, group_src=0)
            places = handle.pieces_of(shard)
            for index in values:
                place = places[index]
                yield (index, name), shard.new_empty(0) if place is None else place.clone()


def unsharded_of(value: Tensor, named: NamedHandle, index: int) -> Tensor:
    """Return the part of a tensor in a parameter's shape that the unit shards.

    Raises:
        ValueError: the parameter is a DTensor, and the tensor is not.
    Collectives: those of `full_tensor_of`; none over the ranks of tensor parallelism.
    """
    parallel = named.handle.param_infos[index].parallel
    if parallel is None:
        return full_tensor_of(value, named.handle.device)
    if not isinstance(value, DTensor):
        raise ValueError(
            f"the state of {named.names[index]} is a {type(value).__name__}, but the parameter is a DTensor over "
            f"{parallel.mesh}; convert an unsharded tensor by torch.distributed.tensor.distribute_tensor"
        )
    return unsharded_in(value, named.wrapper._mesh, parallel)


def full_tensor_of(value: Tensor, device: torch.device) -> Tensor:
    """Return the full tensor of a DTensor or ShardedTensor, or a plain tensor unchanged.

    Args:
        device: device on which the ranks compute. A sharded tensor is gathered there, wherever its shards are.

    Collectives: an all-gather of a DTensor or ShardedTensor over the ranks that have a part of it.
    """
    if isinstance(value, DTensor):
        sharded: DTensor = value.to(value.device_mesh.device_type)  # pyright: ignore[reportAssignmentType]  Tensor's stub
        return sharded.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value.detach()
    group = value._process_group
    rows, *rest = shape_of(value)
    width = -(-rows // group.size())
    local = torch.zeros(width, *rest, dtype=dtype_of(value), device=device)
    for shard in value.local_shards():
        local[: shard.tensor.shape[0]].copy_(shard.tensor)
    unsharded = local.new_empty(width * group.size(), *rest)
    dist.all_gather([*unsharded.tensor_split(group.size())], local, group=group)
    return unsharded[:rows]


def _chunk_in(value: Tensor, slot: Slot, handle: FlatParamGroup) -> Tensor | None:
    """Return this rank's rows of a tensor, or None if the ranks have other rows than `chunk_of` gives."""
    world = handle.layout.world
    if isinstance(value, DTensor):
        *outer, inner = value.placements
        is_chunked = inner == Shard(0) and all(placement == Replicate() for placement in outer)
        return value.to_local() if is_chunked and value.device_mesh.size(-1) == world else None
    if not isinstance(value, ShardedTensor):
        return None
    sizes = [metadata.shard_sizes[0] for metadata in value.metadata().shards_metadata]
    chunks = [chunk_of(slot, rank, world).shape for rank in range(world)]
    if sizes != [shape[0] for shape in chunks if is_part(shape, slot.shape)]:
        return None
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(chunks[handle.rank], dtype=dtype_of(value))


# States of one flat parameter


def check_states_agree(names: Sequence[str], states: dict[int, StateDict]) -> None:
    """Check the states of parameters that an optimizer steps as one.

    Raises:
        ValueError: they differ in more than the elements of tensors.
    """
    types = {frozenset(state) for state in states.values()}
    if len(types) > 1:
        raise ValueError(f"Differing optimizer state names for the unflattened parameters: {[*names]}")
    for state_name in next(iter(types)):
        values = [states.get(index, {}).get(state_name) for index in range(len(names))]
        if any(value is not None for value in values):
            _check_values_agree(state_name, values, [*names])


def _check_values_agree(state_name: str, values: list[Any], names: list[str]) -> None:
    present = [value for value in values if value is not None]
    # Sharded and unsharded values may be mixed, because DCP reads states of one element unsharded.
    types = {"sharded" if is_sharded(value) else type(value) for value in present}
    if len(types) > 1:
        raise ValueError(
            f"Differing optimizer state types for state {state_name}, values {present}, and unflattened parameter "
            f"names {names}"
        )
    if is_sharded(present[0]):
        dtypes = {dtype_of(value) for value in present}
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
    if isinstance(present[0], Tensor):
        numbers = {None if value is None else value.item() for value in values}
        dtypes = {None if value is None else value.dtype for value in values}
        if len(numbers) > 1 or len(dtypes) > 1:
            raise ValueError(
                f"{must} {numbers} and dtypes {dtypes} for state {state_name} and unflattened parameter names {names}"
            )
    elif any(value != present[0] for value in values):
        raise ValueError(
            f"{must} {_distinct(values)} for state {state_name} and  unflattened parameter names {names}"
        )


def _distinct(values: Iterable[object]) -> Any:
    values = list(values)
    try:
        return set(values)
    except TypeError:  # lists are not hashable
        return values
