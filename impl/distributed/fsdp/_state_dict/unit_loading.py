"""Load of a state dict into one unit, whose modules have stand-ins during the walk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from impl.distributed.fsdp._engine.phase import SUMMONED, Phase
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._layout.flat_slots import Slot
from impl.distributed.fsdp._params.managed import clean_name
from impl.distributed.fsdp._params.tensor_parallel import local_of, root_mesh_of
from impl.distributed.fsdp._state_dict.packing import chunk_in, dtype_of, own_numel, rows_in, shape_of
from impl.distributed.fsdp._state_dict.redistribution import Redistribution, ShardChunk, chunk_of, elements_of
from impl.distributed.fsdp._state_dict.saving import WRAPPED, write_back_and_reshard
from impl.distributed.fsdp._state_dict.stand_in import StandIn, stand_ins_for
from impl.distributed.fsdp.api import ShardedStateDictConfig, StateDictConfig, StateDictType


def is_seen_by_first_rank(wrapper: Wrapper) -> bool:
    """Return whether the first rank alone has the unit's unsharded parameters.

    With tensor parallelism, several ranks have parts of them.
    """
    return wrapper._unit.phase is Phase.SUMMONED_ON_FIRST_RANK and not wrapper._groups.parallel


@dataclass(frozen=True)
class LoadedPiece:
    """Values that a rank loads into its piece of a parameter."""

    shape: torch.Size  # shape of the full parameter
    values: Tensor | None  # [numel of the piece], or None if the rank has no piece
    is_meta = False


class UnitLoading:
    """Load of a state dict into one unit."""

    def __init__(self, wrapper: Wrapper, kind: StateDictType, config: StateDictConfig) -> None:
        self._wrapper = wrapper
        self._unit = wrapper._unit
        self._kind = kind
        self._config = config
        self._registered = ExitStack()
        self._sources: dict[FlatParamGroup, list[Any]] = {}

    def begin(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        write_back_and_reshard(self._unit, self._kind)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[prefix + WRAPPED + key.removeprefix(prefix)] = state_dict.pop(key)
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            return self._begin_local(state_dict, prefix)
        problems = []
        if self._kind is StateDictType.SHARDED_STATE_DICT:
            problems = self._hide_sharded(state_dict, prefix)
        stand_ins = {handle: stand_ins_for(handle, self) for handle in self._unit.param_groups}
        has_own = self._wrapper._use_orig_params and self._unit.phase not in SUMMONED
        if has_own and self._kind is StateDictType.FULL_STATE_DICT:
            self._replace_own_parameters(state_dict, prefix, stand_ins)
        for handle in self._unit.param_groups:
            self._registered.enter_context(handle.registration.registering(stand_ins[handle]))
        return problems

    def _replace_own_parameters(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        stand_ins: Mapping[FlatParamGroup, Sequence[StandIn]],
    ) -> None:
        """Replace parameters that the dict has under their own names by stand-ins, which keep the current values.

        torch.distributed.checkpoint's `set_model_state_dict` adds them to a partial dict.
        """
        for handle, index, name in self._names():
            key = prefix + WRAPPED + name
            if state_dict.get(key) is handle.parameters[index]:
                state_dict[key] = stand_ins[handle][index]

    def end(self) -> None:
        """Take the values of the stand-ins. A second call does nothing."""
        if not self._sources:
            self._sources = {handle: _loaded_values(handle) for handle in self._unit.param_groups}
        self._registered.close()

    def problems_of_sources(self) -> list[str]:
        """Return the values that were assigned to a parameter and cannot be copied into it, as text."""
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            return []
        return [
            f"{handle.layout.slots[index].name}: rank {self._wrapper.rank} got {_describe_source(source)}, but keeps "
            f"{expected}"
            for handle, sources in self._sources.items()
            for index, source in enumerate(sources)
            if source is not None
            and _describe_source(source) != (expected := self._expected_source(handle, index))
        ]

    def _expected_source(self, handle: FlatParamGroup, index: int) -> str:
        slot = handle.layout.slots[index]
        if handle.param_infos[index].parallel or self._comes_over_root_mesh():
            return f"a DTensor of shape {tuple(handle.global_shape(index))}"
        if self._kind is StateDictType.SHARDED_STATE_DICT:
            chunk = chunk_of(slot, self._wrapper._groups.shard_rank, handle.layout.world)
            return f"a tensor of shape {chunk.shape}"
        return f"a tensor of shape {slot.shape}"

    def source_of(self, handle: FlatParamGroup, index: int) -> str:
        # LOCAL_STATE_DICT has one shard of all parameters together.
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            return "nothing"
        source = self._sources[handle][index]
        if isinstance(source, DTensor):
            return f"a part in {source.dtype} as {source.placements}"
        if self._kind is not StateDictType.SHARDED_STATE_DICT or source is None:
            return "nothing"
        return f"a part in {source.dtype}"

    def _comes_over_root_mesh(self) -> bool:
        """Return whether the parts are DTensors over a mesh that contains this unit's mesh."""
        mesh = self._wrapper._device_mesh
        is_sharded = self._kind is StateDictType.SHARDED_STATE_DICT
        return is_sharded and mesh is not None and root_mesh_of(mesh) != mesh

    @torch.no_grad()
    def write(self) -> None:
        for handle, sources in self._sources.items():
            present = [index for index, source in enumerate(sources) if source is not None]
            if self._goes_to_first_rank(handle):
                self._write_summoned(handle, {index: sources[index] for index in present})
                continue
            is_summoned, shard = self._unit.phase in SUMMONED, handle.flat_param.detach()
            if is_summoned and handle.is_sharded:
                # The end of summon_full_params decides whether the summoned values are kept.
                shard = shard.clone()
            match self._kind:
                case StateDictType.LOCAL_STATE_DICT:
                    for source in sources:
                        shard[: len(source)].copy_(source)
                case StateDictType.SHARDED_STATE_DICT:
                    self._write_chunks(handle, shard, present, [sources[index] for index in present])
                case _:
                    for index in present:
                        _write_unsharded(handle, shard, index, sources[index])
            if is_summoned:
                views = handle.views_of(handle.gather_like(shard, self._unit.name))
                self._write_summoned(handle, {index: views[index] for index in present})

    def _goes_to_first_rank(self, handle: FlatParamGroup) -> bool:
        """Return whether the values are written to the first rank's unsharded parameters, and nowhere else."""
        is_full = self._kind is StateDictType.FULL_STATE_DICT
        return is_full and handle.is_sharded and is_seen_by_first_rank(self._wrapper)

    def piece_of(self, unsharded: Tensor, name: str) -> LoadedPiece | Tensor:
        """Return what this rank needs of `unsharded`, a new tensor that is loaded into the parameter `name`."""
        for handle in self._unit.param_groups:
            for index, slot in enumerate(handle.layout.slots):
                if slot.name == name:
                    if self._goes_to_first_rank(handle):
                        return unsharded
                    values = _own_piece(handle, index, unsharded)
                    return LoadedPiece(unsharded.shape, None if values is None else values.clone())
        raise AssertionError(name)

    # ShardedTensor and DTensor

    def _hide_sharded(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Replace sharded values in the dict by stand-ins, which nn.Module compares with those in the modules."""
        problems: list[str] = []
        config = self._config
        uses_dtensor = isinstance(config, ShardedStateDictConfig) and config._use_dtensor
        expected = DTensor if uses_dtensor else ShardedTensor
        for handle, index, name in self._names():
            key = prefix + WRAPPED + name
            if key not in state_dict:
                continue
            value = state_dict[key]
            chunk = chunk_in(value, expected, self._wrapper.rank)
            slot, shape = handle.layout.slots[index], handle.global_shape(index)
            problem = self._problem_of(value, chunk, slot, shape)
            problems += [f"{prefix}{name}: {problem}"] if problem else []
            dtype = dtype_of(value)
            part = torch.empty(0, *slot.shape[1:], dtype=dtype) if chunk is None else chunk
            # Before all ranks have agreed to load it, nothing of it is sent.
            source = value if self._comes_over_root_mesh() else part
            state_dict[key] = self._stand_in(shape, dtype, name, source)
        return problems

    def _problem_of(self, value: Any, chunk: Tensor | None, slot: Slot, shape: torch.Size) -> str:
        groups = self._wrapper._groups
        who = f"rank {self._wrapper.rank} of {self._wrapper.world_size} got"
        if shape_of(value) != shape:
            return f"{who} {_describe_source(value)} but the parameter has the shape {tuple(shape)}"
        if self._comes_over_root_mesh():
            own_mesh = root_mesh_of(self._wrapper._mesh)
            if value.device_mesh == own_mesh:
                return ""
            return (
                f"{who} a DTensor over {value.device_mesh} but keeps one over {own_mesh}; load a state dict of another "
                "mesh by torch.distributed.checkpoint"
            )
        expected = chunk_of(slot, groups.shard_rank, groups.shard_size).shape
        actual = (0, *slot.shape[1:]) if chunk is None else tuple(chunk.shape)
        if actual == expected:
            return ""
        return (
            f"{who} a part of shape {actual} but keeps {expected}; load a state dict of another number of ranks "
            "by torch.distributed.checkpoint"
        )

    def _write_chunks(
        self, handle: FlatParamGroup, shard: Tensor, indices: Sequence[int], chunks: Sequence[Tensor]
    ) -> None:
        chunks_of_params = [
            ShardChunk(index, self._rows_in(handle, index, chunk))
            for index, chunk in zip(indices, chunks, strict=True)
        ]
        redistribution = Redistribution(handle.layout, self._wrapper._groups, handle.device, self._unit.name)
        for index, values in zip(indices, redistribution.pieces_from(chunks_of_params), strict=True):
            piece = handle.pieces[index]
            if piece is not None:
                shard.narrow(0, piece.offset, piece.numel).copy_(values)

    def _rows_in(self, handle: FlatParamGroup, index: int, source: Tensor) -> Tensor:
        if not isinstance(source, DTensor):
            return source
        slot, parallel = handle.layout.slots[index], handle.param_infos[index].parallel
        return rows_in(source, slot, self._wrapper._mesh, parallel)

    # Shards

    def _begin_local(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        problems: list[str] = []
        if self._wrapper._use_orig_params:  # torch's dicts contain them too
            for _, _, name in self._names():
                state_dict.pop(prefix + WRAPPED + name, None)
        for name, handle in self._wrapper._named_handles():
            key = prefix + WRAPPED + name
            if key not in state_dict:
                raise AssertionError(
                    "No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters"
                )
            value = state_dict[key]
            if not isinstance(value, ShardedTensor):
                raise AssertionError("Tensors in local_state_dict should be ShardedTensor.")
            problem, shard = self._shard_in(value, handle)
            problems += [f"{prefix}{name}: {problem}"] if problem else []
            self._sources[handle] = [shard]
            shape = handle.flat_param.shape
            state_dict[key] = self._stand_in(shape, dtype_of(value), name)
            self._registered.enter_context(
                handle.registration.registering_flat_param(self._stand_in(shape, handle.dtype, name))
            )
        return problems

    def _shard_in(self, value: ShardedTensor, handle: FlatParamGroup) -> tuple[str, Tensor]:
        rank, layout = self._wrapper._groups.shard_rank, handle.layout
        shards = value.local_shards()
        actual = [
            (shard.metadata.shard_offsets[0], shard.tensor.numel())
            for shard in shards
            if shard.tensor.numel() and not shard.tensor.is_meta
        ]
        numel = own_numel(layout, rank)
        expected = [(rank * layout.shard_numel, numel)] if numel else []
        numel_of_all = shape_of(value).numel()
        if actual == expected and numel_of_all == layout.numel:
            return "", shards[0].tensor if shards else handle.flat_param.detach()[:0]
        return (
            f"rank {self._wrapper.rank} of {self._wrapper.world_size} got (offset, elements) {actual} of "
            f"{numel_of_all} but keeps {expected} of {layout.numel}; load LOCAL_STATE_DICT on as many ranks "
            "as saved it, with the same wrapping"
        ), handle.flat_param.detach()[:0]

    # Both

    def _names(self) -> list[tuple[FlatParamGroup, int, str]]:
        """Return every name of every parameter, without prefixes of wrappers."""
        locations = {
            (location.module, location.attribute): (handle, index)
            for handle in self._unit.param_groups
            for index, info in enumerate(handle.param_infos)
            for location in info.locations
        }
        modules = list(self._wrapper._fsdp_wrapped_module.named_modules(remove_duplicate=False))
        prefixes: dict[nn.Module, list[str]] = {}
        for name, module in modules:
            prefixes.setdefault(module, []).append(clean_name(f"{name}.") if name else "")
        return [
            (*place, before + attribute)
            for (module, attribute), place in locations.items()
            for before in prefixes[module]
        ]

    def _stand_in(self, shape: torch.Size, dtype: torch.dtype, name: str, source: object = None) -> StandIn:
        like = torch.empty(shape, dtype=dtype, device="meta")
        return StandIn.create(like, name, device=self._wrapper.compute_device, owner=self, source=source)

    def _write_summoned(self, handle: FlatParamGroup, loaded: dict[int, Tensor]) -> None:
        """Copy loaded values into the unsharded parameters inside `summon_full_params`, if this rank has them."""
        if not self._unit.summoned:
            return
        registered = dict(handle.registration.registered())
        for index, values in loaded.items():
            target = registered[index]
            assert target is not None
            local_of(target.detach()).copy_(_local_part(handle, index, values))


def _loaded_values(handle: FlatParamGroup) -> list[Any]:
    """Return the value to load for each parameter: that of its stand-in, or one that was assigned instead."""
    values: list[Any] = [None] * len(handle.layout.slots)
    for index, tensor in handle.registration.registered():
        source = tensor.source if isinstance(tensor, StandIn) else tensor
        if source is not None:
            values[index] = source
    return values


def _describe_source(source: Any) -> str:
    kind = f"a {type(source).__name__}" if isinstance(source, (ShardedTensor, DTensor)) else "a tensor"
    if not isinstance(source, ShardedTensor) and source.is_meta:
        kind = "a meta tensor"
    return f"{kind} of shape {tuple(shape_of(source))}"


def _write_unsharded(handle: FlatParamGroup, shard: Tensor, index: int, source: Tensor | LoadedPiece) -> None:
    """Copy this rank's piece of an unsharded parameter into `shard`."""
    piece = handle.pieces[index]
    if isinstance(source, LoadedPiece):
        values = source.values
    else:
        values = _own_piece(handle, index, _local_part(handle, index, source))
    if piece is not None and values is not None:
        shard.narrow(0, piece.offset, piece.numel).copy_(values)


def _local_part(handle: FlatParamGroup, index: int, source: Tensor) -> Tensor:
    """Return the part of an unsharded parameter for this rank, if tensor parallelism divides it."""
    parallel = handle.param_infos[index].parallel
    return source if parallel is None or not isinstance(source, DTensor) else parallel.local_part(source)


def _own_piece(handle: FlatParamGroup, index: int, unsharded: Tensor) -> Tensor | None:
    """Return this rank's piece of an unsharded parameter, [numel of the piece], or None."""
    piece = handle.pieces[index]
    return None if piece is None else elements_of(piece, unsharded.detach(), handle.layout.slots[index])
