"""A unit's part of a state dict, while `nn.Module.state_dict` walks through its modules.

Before the walk the unit's values are created, one flat parameter after the other, and registered in the modules
instead of the parameters. So nn.Module gives them their keys, and users' hooks see them. If a rank must not have a
parameter unsharded, a stand-in is registered. After the walk, the value of the stand-in replaces it in the dict.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from impl.distributed.fsdp._comm.desync.collective_order import allow_saving
from impl.distributed.fsdp._engine.phase import SUMMONED, SUMMONED_ON_ALL_RANKS, Phase
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._params.tensor_parallel import local_of
from impl.distributed.fsdp._state_dict.packing import (
    dtensor_of_rows,
    sharded_tensor_of_flat_param,
    sharded_tensor_of_rows,
)
from impl.distributed.fsdp._state_dict.redistribution import Redistribution, ShardPiece, chunk_of
from impl.distributed.fsdp._state_dict.stand_in import StandIn, stand_ins_for
from impl.distributed.fsdp.api import (
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)

WRAPPED = "_fsdp_wrapped_module."


class StateDictSaving:
    """Part of a state dict that belongs to one unit.

    Args:
        wrapper: the FullyShardedDataParallel.
        kind: type of the state dict; FULL_STATE_DICT if nothing is sharded.
        config: config of that type.
    """

    def __init__(self, wrapper: Wrapper, kind: StateDictType, config: StateDictConfig) -> None:
        self._wrapper = wrapper
        self._unit = wrapper._unit
        self._kind = kind
        self._config = config
        # The first rank, which alone has unsharded parameters, may save alone.
        self._issues_no_gather = (
            kind is StateDictType.FULL_STATE_DICT
            and self._unit.phase is Phase.SUMMONED_ON_FIRST_RANK
            and wrapper._groups.shard is not None
        )
        is_rank0_only = isinstance(config, FullStateDictConfig) and config.rank0_only
        self._gets_no_values = (
            not self._unit.summoned if self._issues_no_gather else is_rank0_only and wrapper.rank != 0
        )
        self._registered = ExitStack()
        # Tied parameters have several keys, which must not share memory in the dict.
        self._copies: dict[int, bool] = {}  # storage -> whether a key has it already
        self._packed: set[int] = set()  # ids of chunks that a key has already

    @torch.no_grad()
    @allow_saving()
    def begin(self) -> None:
        """Register the unit's values in its modules.

        Raises:
            AssertionError: the unit is inside a forward or backward.
            RuntimeError: LOCAL_STATE_DICT was requested inside `summon_full_params`.
        Collectives: for each flat parameter up to eight all-gathers, or one all-to-all for SHARDED_STATE_DICT; none
            for LOCAL_STATE_DICT, and for FULL_STATE_DICT inside `summon_full_params`.
        """
        write_back_and_reshard(self._unit, self._kind)
        for handle in self._unit.param_groups:
            if self._kind is not StateDictType.LOCAL_STATE_DICT:
                self._registered.enter_context(handle.registration.registering(self._values_of(handle)))
            elif handle.use_orig_params:
                self._registered.enter_context(handle.registration.registering(stand_ins_for(handle, self)))

    def abandon(self) -> None:
        """Register what the modules had before."""
        self._registered.close()

    @torch.no_grad()
    def end(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Convert the values that the walk has collected below the prefix, and give them their names."""
        self._registered.close()
        for key in [key for key in state_dict if key.startswith(prefix)]:
            value = state_dict[key]
            name = prefix + key.removeprefix(prefix).removeprefix(WRAPPED)
            if isinstance(value, StandIn) and value.owner is self:
                del state_dict[key]
                if value.source is not None:
                    state_dict[name] = self._pack(*value.source)
                continue
            if name != key:
                del state_dict[key]
            state_dict[name] = self._own(value)
        if not self._unit.param_groups:
            return
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            self._put_flat_params(state_dict, prefix)
        else:
            self._put_buffers(state_dict, prefix)

    # Values in the modules

    def _values_of(self, handle: FlatParamGroup) -> Sequence[Tensor]:
        if self._kind is StateDictType.SHARDED_STATE_DICT:
            chunks = self._chunks_of(handle)
            sources = [(chunk, handle, index) for index, chunk in enumerate(chunks)]
            return stand_ins_for(handle, self, sources)
        copies = self._unsharded_copies(handle)  # every rank must take part
        if self._gets_no_values:
            return stand_ins_for(handle, self)
        self._copies.update((_storage_of(copy), False) for copy in copies)
        return [
            nn.Parameter(copy, handle.wants_grad(index))
            for index, copy in enumerate(handle.wrap_locals(copies))
        ]

    def _unsharded_copies(self, handle: FlatParamGroup) -> list[Tensor]:
        """Return copies of the unsharded parameters, or none on a rank that is left out.

        Beyond the copies no rank has more than a run of the buffer at a time.
        """
        is_summoned = bool(self._unit.summoned)
        if is_summoned or self._issues_no_gather or self._wrapper._groups.shard is None:
            if self._gets_no_values:
                return []
            full_tensors = (
                _summoned_tensors(handle) if is_summoned else handle.views_of(handle.flat_param.data)
            )
            # Parameters that were summoned to the CPU may not fit on the compute device.
            stays = is_summoned and not self._config.offload_to_cpu
            return [unsharded.clone() if stays else self._copy(unsharded) for unsharded in full_tensors]
        slots = () if self._gets_no_values else handle.layout.slots
        memories = [torch.empty(slot.numel, dtype=handle.dtype, device=self._device) for slot in slots]
        stops = [slot.stop for slot in slots]
        for first, run in handle.gather_runs(self._unit.name):
            end = first + run.numel()
            for index in range(bisect_right(stops, first), len(slots)):
                slot, memory = slots[index], memories[index]
                if slot.start >= end:
                    break
                start, stop = max(slot.start, first), min(slot.stop, end)
                memory[start - slot.start : stop - slot.start] = run[start - first : stop - first]
        return [
            memory.as_strided(slot.shape, slot.stride) for slot, memory in zip(slots, memories, strict=True)
        ]

    def _chunks_of(self, handle: FlatParamGroup) -> list[Tensor]:
        groups, layout = self._wrapper._groups, handle.layout
        if self._unit.phase in SUMMONED_ON_ALL_RANKS:
            chunks = [chunk_of(slot, groups.shard_rank, layout.world) for slot in layout.slots]
            full_tensors = _summoned_tensors(handle)
            return [
                self._copy(unsharded[chunk.first_row : chunk.stop_row])
                for unsharded, chunk in zip(full_tensors, chunks, strict=True)
            ]
        pieces = handle.pieces_of(handle.flat_param.data)
        sharded = [ShardPiece(index, handle.dtype, piece) for index, piece in enumerate(pieces)]
        return Redistribution(layout, groups, handle.device, self._unit.name).chunks_from(sharded)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self._config.offload_to_cpu else self._wrapper.compute_device

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.device == self._device else tensor.to(self._device)

    # Values in the dict

    def _own(self, value: Any) -> Any:
        """Return a copy that is detached from autograd and shared with no other key. Return other values unchanged."""
        storage = _storage_of(local_of(value)) if type(value) in (Tensor, nn.Parameter, DTensor) else 0
        if storage not in self._copies:
            return value
        has_a_key, self._copies[storage] = self._copies[storage], True
        return value.detach().clone() if has_a_key else value.detach()

    def _pack(self, chunk: Tensor, handle: FlatParamGroup, index: int) -> Any:
        slot = handle.layout.slots[index]
        if id(chunk) in self._packed:
            chunk = chunk.clone()  # the parameter has another name too
        self._packed.add(id(chunk))
        packed: Any
        if isinstance(self._config, ShardedStateDictConfig) and self._config._use_dtensor:
            packed = dtensor_of_rows(chunk, slot, self._wrapper._mesh, handle.param_infos[index].parallel)
        else:
            packed = sharded_tensor_of_rows(chunk, slot, handle.layout, self._wrapper.process_group)
        return packed.cpu() if self._config.offload_to_cpu else packed

    def _put_flat_params(self, state_dict: dict[str, Any], prefix: str) -> None:
        for name, handle in self._wrapper._named_handles():
            shard: Tensor = handle.flat_param
            if self._config.offload_to_cpu and not shard.is_cpu:
                shard = shard.cpu().requires_grad_(shard.requires_grad)
            state_dict[prefix + name] = sharded_tensor_of_flat_param(
                shard, handle.layout, self._wrapper.process_group
            )

    def _put_buffers(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Convert buffers to the dtype that they had before wrapping."""
        casts = self._wrapper.mixed_precision.buffer_dtype is not None
        for name, dtype in self._wrapper._buffer_dtypes.items():
            key = prefix + name
            if key not in state_dict:  # not all buffers are persistent
                continue
            if self._gets_no_values:
                del state_dict[key]
                continue
            if self._config.offload_to_cpu:
                state_dict[key] = state_dict[key].to("cpu")
            if casts and name not in self._wrapper._ignored.buffer_names:
                state_dict[key] = state_dict[key].to(dtype, copy=True)


def write_back_and_reshard(unit: Unit[FlatParamGroup], kind: StateDictType) -> None:
    """Write the user's changes into the shards and reshard the unit, unless its parameters are summoned.

    Raises:
        AssertionError: the unit is inside a forward or backward.
        RuntimeError: its parameters are unsharded, and shards are requested.
    """
    if unit.phase not in (Phase.IDLE, *SUMMONED):
        raise AssertionError(
            f"the state of {unit.name} cannot be saved or loaded during its {unit.phase.value}"
        )
    if unit.phase in SUMMONED and kind is StateDictType.LOCAL_STATE_DICT:
        raise RuntimeError(
            f"LOCAL_STATE_DICT saves shards, but the parameters of {unit.name} are unsharded inside "
            "summon_full_params(); leave the context first"
        )
    if unit.phase is Phase.IDLE:
        unit.reshard()
        for handle in unit.param_groups:
            handle.write_back_changes()


def _summoned_tensors(handle: FlatParamGroup) -> list[Tensor]:
    """Return the unsharded parameters that the user sees and may have written to; local tensors for DTensors."""
    registered = dict(handle.registration.registered())
    return [local_of(cast("Tensor", registered[index]).detach()) for index in range(len(handle.layout.slots))]


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
