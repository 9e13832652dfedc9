"""Context manager that unshards parameters for the user to read and write, and reshards them afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from impl.distributed.fsdp._comm.desync.collective_order import allow_saving
from impl.distributed.fsdp._engine.phase import Move, next_phase
from impl.distributed.fsdp._engine.streams import StreamRole
from impl.distributed.fsdp._engine.unit import Unit
from impl.distributed.fsdp._engine.unit_params import gather_group
from impl.distributed.fsdp._layout.flat import FlatParamGroup
from impl.distributed.fsdp._layout.flat_buffer import UnshardedBuffer
from impl.distributed.fsdp._layout.unreduced_grads import set_grad
from impl.distributed.fsdp._params.param_registration import keeping_order
from impl.distributed.fsdp._params.tensor_parallel import local_of

# Index, address, version, and version of the local tensor of a summoned parameter.
_Version = tuple[int, int, int, int]


@dataclass(frozen=True)
class FullParamsOptions:
    """Arguments of `summon_full_params`."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


def check(options: FullParamsOptions, use_orig_params: bool, is_sharded: bool) -> None:
    """Check the arguments of `summon_full_params`.

    Raises:
        NotImplementedError: a combination that torch refuses too.
    """
    if options.with_grads and (options.offload_to_cpu or not use_orig_params):
        raise NotImplementedError(
            f"with_grads={options.with_grads}, use_orig_params={use_orig_params}, "
            f"offload_to_cpu={options.offload_to_cpu} is not supported yet"
        )
    if options.offload_to_cpu and not is_sharded:
        raise NotImplementedError("offload_to_cpu=True and NO_SHARD is not supported yet")
    if options.writeback and options.rank0_only:
        raise NotImplementedError("writeback=True and rank0_only=True is not supported yet")
    if options.offload_to_cpu and not options.rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in theunsharded parameters being redundantly copied "
            "to CPU memory for GPUs sharing the same CPU memory, which risks CPU OOM. We recommend using "
            "offload_to_cpu=True with rank0_only=True.",
            stacklevel=2,
        )


@contextmanager
def summoned(unit: Unit[FlatParamGroup], options: FullParamsOptions, is_rank0: bool) -> Generator[None]:
    """Context manager in which the unit's modules have unsharded parameters, in the dtype that the optimizer steps.

    Raises:
        AssertionError: the unit is inside a forward or backward, or summoned already.
    Collectives: an all-gather for each flat parameter, and with gradients an all-reduce and another all-gather.
    """
    next_phase(unit.phase, Move.SUMMON, unit.name)  # raises before anything is changed
    unit.reshard()
    for handle in unit.param_groups:
        handle.write_back_changes()
    unit.root.streams.wait_stream(StreamRole.GATHER, StreamRole.COMPUTE)
    unit.root.memory.admit(unit)
    has_full_params = is_rank0 or not options.rank0_only
    keeps = has_full_params and not options.offload_to_cpu
    summoned_handles = [_SummonedHandle(unit, handle, options) for handle in unit.param_groups]
    registries = [registry for handle in unit.param_groups for registry in handle.registration.registries()]
    # If a gather raises, only some of the flat parameters are registered again.
    with keeping_order(registries):
        try:
            with allow_saving():
                for summoned_handle in summoned_handles:
                    summoned_handle.begin(has_full_params)
            if not keeps:
                unit.root.memory.note_resharded(unit)
            unit.begin_summoning(summoned_handles if has_full_params else (), by_all=not options.rank0_only)
            try:
                yield
            finally:
                unit.end_summoning()
        finally:
            for summoned_handle in summoned_handles:
                if summoned_handle.is_registered:
                    summoned_handle.end()
            unit.root.memory.note_resharded(unit)
            unit.root.wait_for_pinned_reads()


class _SummonedHandle:
    """Flat parameter while it is summoned."""

    def __init__(
        self,
        unit: Unit[FlatParamGroup],
        handle: FlatParamGroup,
        options: FullParamsOptions,
    ) -> None:
        self._unit = unit
        self._handle = handle
        self._options = options
        self._summoned_buffer = torch.empty(0)  # [padded_numel], memory of the summoned parameters
        self._views: list[Tensor] = []
        self._grad_shard: Tensor | None = None
        self._was_computed_with = False
        self._has_unsharded_grads = False
        # Summoned parameters, while the modules have unsharded views instead, for a forward.
        self._summoned_aside: dict[int, Tensor | None] | None = None
        # Versions of the summoned parameters at the last use by a forward.
        self._versions: list[_Version] = []
        self._first_versions: list[_Version] = []
        self._shard_versions: list[int] = []  # `handle.versions` at the beginning

    @property
    def is_registered(self) -> bool:
        return bool(self._views)

    @torch.inference_mode(False)  # inference tensors have no version
    @torch.no_grad()
    def begin(self, has_full_params: bool) -> None:
        handle, unit = self._handle, self._unit
        unsharded = handle.unsharded(handle.dtype)
        streams = unit.root.streams
        with streams.on(StreamRole.GATHER):
            gather_group(handle, handle.dtype, unit.name)
        streams.wait_stream(StreamRole.COMPUTE, StreamRole.GATHER)
        grads = self._gather_grads() if self._options.with_grads else None
        if not has_full_params:
            return
        self._summoned_buffer = unsharded.flat
        if self._options.offload_to_cpu and handle.is_sharded:
            self._summoned_buffer = torch.empty_like(unsharded.flat, device="cpu").copy_(unsharded.flat)
        self._shard_versions = handle.versions
        self._views = handle.views_of(self._summoned_buffer)
        handle.registration.register_unsharded_params(self._views)
        self._first_versions = self._versions = self._versions_now()
        if grads is not None:
            unsharded_grads = handle.wrap_locals(handle.views_of(grads))
            for index, parameter in self._registered():
                if parameter.requires_grad:
                    set_grad(parameter, unsharded_grads[index])
                else:
                    parameter.grad = None
            self._has_unsharded_grads = handle.is_sharded

    def check_backward(self, name: str) -> None:
        """Check that a backward may reach the unit while it is summoned.

        Raises:
            RuntimeError: it would add this rank's shard of an average to the unsharded gradients.
        """
        if self._has_unsharded_grads:
            raise RuntimeError(
                f"backward reached {name} inside summon_full_params(with_grads=True), where `.grad` holds unsharded "
                "gradients, to which the shard of a backward cannot be added; leave the context first, summon without "
                "with_grads, or set the gradients to None before entering it"
            )

    def use_unsharded_views(self, dtype: torch.dtype) -> UnshardedBuffer:
        handle = self._handle
        if self._summoned_aside is None:
            self._apply_user_changes()
            self._summoned_aside = dict(handle.registration.registered())
            if not handle.use_orig_params:
                handle.registration.restore_flat_param()
            unsharded = handle.unsharded(dtype)
            if unsharded.flat.data_ptr() != self._summoned_buffer.data_ptr():
                unsharded.allocate()
                unsharded.flat.copy_(self._summoned_buffer)
            unsharded.record_filled(handle.versions)
        self._was_computed_with = True
        return handle.use_unsharded_views(dtype)

    def use_kept_views(self) -> None:
        if self._summoned_aside is None:
            return
        self._handle.use_sharded_views()
        tensors = [cast("Tensor", self._summoned_aside[index]) for index in range(len(self._summoned_aside))]
        self._summoned_aside = None
        self._handle.registration.register_again(tensors)

    def end(self) -> None:
        # A failed backward inside has left its views in the modules, perhaps in a lower precision.
        self.use_kept_views()
        handle = self._handle
        keeps = self._options.writeback or not handle.is_sharded
        if keeps:
            self._apply_user_changes()
            self._write_back()
        elif not self._was_computed_with:
            # No graph contains the discarded values.
            handle.ignore_writes_since(self._shard_versions)
        elif self._first_versions != self._versions_now():
            # A graph may contain values that no parameter has any more.
            torch.autograd.graph.increment_version(handle.flat_param)
        if handle.use_orig_params:
            handle.point_params_into_shard()
        else:
            handle.registration.restore_flat_param()
        handle.use_sharded_views()
        if self._grad_shard is not None:
            handle.gradients.publish(self._grad_shard)
        elif self._has_unsharded_grads:
            # This rank had no gradients, while other ranks had some.
            for parameter in handle.parameters:
                parameter.grad = None

    def _registered(self) -> list[tuple[int, Tensor]]:
        pairs = self._handle.registration.registered()
        return [(index, tensor) for index, tensor in pairs if tensor is not None]

    def _gather_grads(self) -> Tensor | None:
        """Return the unsharded gradients [padded_numel], or None if no rank has any. Missing gradients are zeros."""
        handle, groups = self._handle, self._handle.process_groups
        shard = handle.gradients.current()
        if groups.shard is not None:
            absent = torch.tensor([int(shard is None)], dtype=torch.int32, device=handle.device)
            dist.all_reduce(absent, group=groups.shard)
            if absent.item() == groups.shard_size:
                return None
        elif shard is None:
            return None
        self._grad_shard = shard
        if shard is None:
            shard = handle.flat_param.new_zeros(handle.layout.shard_numel)
        return handle.gather_like(shard, self._unit.name)

    def _versions_now(self) -> list[_Version]:
        return [
            (index, local_of(param).data_ptr(), param._version, local_of(param)._version)
            for index, param in self._registered()
        ]

    @torch.no_grad()
    def _apply_user_changes(self) -> None:
        """Copy assigned tensors into the buffer, and count writes to summoned parameters as writes to the shard.

        With `use_orig_params` a write counts for that parameter only.
        """
        handle = self._handle
        for index, tensor in self._registered():
            view, local = self._views[index], local_of(tensor.detach())
            if local.data_ptr() != view.data_ptr():
                view.copy_(local)
        before, self._versions = self._versions, self._versions_now()
        if before == self._versions:
            return
        if not handle.use_orig_params:
            torch.autograd.graph.increment_version(handle.flat_param)
        for now in {*self._versions} - {*before}:
            # A summoned DTensor is another object than the stepped parameter.
            if handle.use_orig_params and handle.param_infos[now[0]].parallel is not None:
                torch.autograd.graph.increment_version(handle.parameters[now[0]])

    @torch.no_grad()
    def _write_back(self) -> None:
        handle = self._handle
        handle.shard_casts.forget()  # writes to `.data`
        if not handle.is_sharded and self._summoned_buffer.device == handle.flat_param.device:
            return  # the shard has the same memory
        first = handle.rank * handle.layout.shard_numel if handle.is_sharded else 0
        handle.flat_param.data.copy_(self._summoned_buffer[first : first + handle.layout.shard_numel])
        if self._grad_shard is not None:
            grads = torch.zeros(
                handle.layout.padded_numel, dtype=self._grad_shard.dtype, device=handle.device
            )
            targets = handle.views_of(grads)
            for index, parameter in self._registered():
                if parameter.grad is not None:
                    targets[index].copy_(local_of(parameter.grad))
            self._grad_shard.copy_(grads[first : first + handle.layout.shard_numel])
