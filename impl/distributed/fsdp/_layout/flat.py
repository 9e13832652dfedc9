"""Layout of FullyShardedDataParallel: a group is one flat parameter, gathered and reduced as one buffer.

The *unsharded buffer* is storage for all elements. Unsharding fills it, resharding frees it. Its *views* are the
tensors that the forward computes with. They are created once and share its storage as long as the unit lives, so
neither unsharding nor resharding touches a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.distributed.fsdp._comm.collectives import Reduction, all_gathered
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.cast_shards import CastShards, ShardVersions
from impl.distributed.fsdp._layout.flat_buffer import UnshardedBuffer
from impl.distributed.fsdp._layout.flat_gradients import GradientShard
from impl.distributed.fsdp._layout.flat_handle import FlatParamHandle
from impl.distributed.fsdp._layout.flat_registration import FlatRegistration
from impl.distributed.fsdp._layout.flat_slots import FlatLayout, aligned_elements, layout_of
from impl.distributed.fsdp._params.config import Config
from impl.distributed.fsdp._params.param_group import AllGatherRequest, describe_dtypes, sharding_groups
from impl.distributed.fsdp._params.param_registration import ManagedParam, ShardedPlaceholder
from impl.distributed.fsdp._params.policies import ParamPrecision
from impl.kernels import copy_into_, to_device

# Limits of `gather_runs`: the most all-gathers, and the fewest bytes of each, counted over all ranks.
_MOST_RUNS = 8
_LEAST_RUN_BYTES = 1 << 23


class FlatParamGroup(FlatParamHandle):
    """Flat parameter that implements the engine's protocol of a group."""

    is_tracked = True

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        layout: FlatLayout,
        groups: Groups,
        config: Config,
        device: torch.device,
    ) -> None:
        super().__init__(managed, layout, groups.shard_rank, config, device)
        self.process_groups = groups
        self.reduction = Reduction(groups, self._describe_settings)
        self.gradients = GradientShard(self, config.precision.keep_low_precision_grads)
        self.registration = FlatRegistration(self)
        self.shard_casts = CastShards()
        self.syncs = True
        self.names = [slot.name for slot in layout.slots]
        self._config = config
        self._unsharded: dict[torch.dtype, UnshardedBuffer] = {}
        self.refresh()

    def _describe_settings(self) -> str:
        return ", ".join(describe_dtypes(self))

    def precision_of(self, index: int) -> ParamPrecision:
        del index
        return ParamPrecision(self.compute_dtype, self.reduce_dtype, self.dtype)

    def keeps_after_forward(self, is_outermost: bool, awaits_backward: bool) -> bool:
        # Kept for a backward only, because a write to a parameter's `.data` in between does not change its version.
        if not awaits_backward:
            return False
        return is_outermost or not self._config.frees_after_forward or not self.is_sharded

    def discard_post_forward_shards(self) -> None:
        """Do nothing, because flat parameters have no post-forward shards."""

    def frees_in_backward(self) -> bool:
        if not self.is_sharded:
            return self._config.precision.param_dtype is not None
        return self.syncs or self._config.frees_after_forward

    def check_device(self, compute_device: torch.device) -> None:
        device = self.flat_param.device
        if not self.offloads and device != compute_device:
            raise RuntimeError(
                f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move the module to "
                f"{compute_device} before training."
            )
        if self.offloads and device.type != "cpu":
            raise RuntimeError(
                "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
                f"{device}. Make sure to not move the module from CPU when offloading parameters."
            )

    def gradients_by_groups(self) -> Iterator[tuple[tuple[dist.ProcessGroup, ...], list[Tensor]]]:
        """Yield the gradients of stepped parameters with the groups whose ranks have different elements of them."""
        groups_of_params = sharding_groups(self)
        if len(set(groups_of_params)) == 1:
            yield groups_of_params[0], [p.grad for p in self.stepped if p.grad is not None]
            return
        grads: Sequence[Tensor | None] = [p.grad for p in self.stepped]
        if not self.use_orig_params:
            grads = [None] * len(groups_of_params) if grads[0] is None else self.pieces_of(grads[0])
        for groups, grad in zip(groups_of_params, grads, strict=True):
            yield groups, [] if grad is None else [grad]

    # Changes by the user

    def refresh(self) -> None:
        """Update addresses and views after the shard was created, moved or cast."""
        self.pin()
        if self.flat_param.data_ptr() != self._shard_address or self.flat_param.is_meta:
            for unsharded in self._unsharded.values():
                unsharded.is_invalidated = True
            self._unsharded.clear()
        self._shard_address, self._known_dtype = self.flat_param.data_ptr(), self.dtype
        if self.use_orig_params:
            self.point_params_into_shard()
            self.registration.sharded_views = [*self.parameters]
        else:
            pairs = zip(self.unsharded(self.compute_dtype).views, self.names, strict=True)
            self.registration.sharded_views = [ShardedPlaceholder.of(view, name) for view, name in pairs]
        self.use_sharded_views()
        self.shard_casts.forget()

    @contextmanager
    def changing_flat_param(self, change: Callable[[Tensor], Tensor]) -> Generator[None]:
        """Context manager in which only `flat_param` is registered, and may be moved or cast.

        Raises:
            NotImplementedError: original parameters, which stay the same objects, would move to the meta device.
        """
        if self.use_orig_params and change(self.flat_param.new_empty(0)).is_meta:
            raise NotImplementedError(
                f"{self.names[0]} stays the same object, since use_orig_params is set, and so cannot be "
                "moved to the meta device; wrap the module without use_orig_params, or delete it"
            )
        with ExitStack() as stack:
            stack.callback(self.refresh)
            if self.use_orig_params:
                stack.enter_context(self.registration.registering_flat_param(self.flat_param))
            stack.callback(self.registration.follow_replacement)
            yield

    def write_back_changes(self) -> bool:
        """Copy tensors that the user assigned to a parameter or to its data into the shard.

        Return whether there were any.

        Raises:
            RuntimeError: a tensor has another shape than this rank's piece, or is not a parameter.
        """
        has_new_params = self.registration.take_new_parameters()
        if not has_new_params and not self.has_moved():
            return False
        self._adopt(self.changed_shard())
        if self.use_orig_params:
            self.point_params_into_shard()
            self.registration.sharded_views = [*self.parameters]
        return True

    def _adopt(self, shard: Tensor) -> None:
        """Use another shard. Keep the memory of the previous shard unchanged, because the user may assign it again."""
        self.flat_param.data = shard
        self.pin()
        # A change of memory does not increment the version by itself.
        torch.autograd.graph.increment_version(self.flat_param)
        if self.dtype is not self._known_dtype:
            self.refresh()
            return
        self._shard_address = self.flat_param.data_ptr()
        for unsharded in self._unsharded.values():
            if unsharded.aliases_shard:
                unsharded.alias(self.flat_param.data)

    def ignore_writes_since(self, versions: list[int]) -> None:
        """Ignore writes to the user's own parameters since `versions`, because they did not change the shard."""
        for unsharded in self._unsharded.values():
            unsharded.follow_versions(versions, [versions[0], *self.versions[1:]])

    # Unsharded parameters

    def unsharded(self, dtype: torch.dtype) -> UnshardedBuffer:
        """Return the buffer of a dtype, whether its storage is allocated or not."""
        buffer = self._unsharded.get(dtype)
        if buffer is None:
            shard = self.flat_param.data
            aliases_shard = not self.is_sharded and dtype is self.dtype and shard.device == self.device
            with torch.inference_mode(False):  # the views are used for training too
                buffer = UnshardedBuffer(
                    self.layout,
                    self.param_infos,
                    dtype,
                    self.device,
                    over=shard if aliases_shard else None,
                    sharded_flat_param=None if self.use_orig_params else self.flat_param,
                )
                if self.use_orig_params:
                    buffer.views = [nn.Parameter(view, requires_grad=False) for view in buffer.views]
            self._unsharded[dtype] = buffer
        return buffer

    def is_up_to_date(self, dtype: torch.dtype) -> bool:
        """Return whether the buffer has the current values of the shard."""
        unsharded = self.unsharded(dtype)
        return unsharded.aliases_shard or unsharded.is_filled_from(self.versions)

    def use_unsharded_views(self, dtype: torch.dtype) -> UnshardedBuffer:
        unsharded = self.unsharded(dtype)
        if unsharded.aliases_shard:
            unsharded.record_filled(self.versions)
        unsharded.set_requires_grad([p.requires_grad for p in self.stepped])
        self.registration.use_unsharded_views(unsharded)
        return unsharded

    def use_sharded_views(self, *, after_forward: bool = False) -> None:
        del after_forward
        self.registration.use_sharded_views()

    def use_kept_views(self) -> None:
        """Register the sharded views, because users see the shards between a forward and its backward."""
        self.use_sharded_views()

    def swap_unsharded(
        self, other: dict[torch.dtype, UnshardedBuffer] | None
    ) -> dict[torch.dtype, UnshardedBuffer]:
        previous = {dtype: buffer for dtype, buffer in self._unsharded.items() if not buffer.aliases_shard}
        aliases = {dtype: buffer for dtype, buffer in self._unsharded.items() if buffer.aliases_shard}
        self._unsharded = aliases | (other or {})
        return previous

    def free(self) -> None:
        for unsharded in self._unsharded.values():
            unsharded.free()

    # Casts of an offloaded shard

    def cast_shards(self, params: Collection[int]) -> dict[int, Tensor]:
        is_narrower = self.compute_dtype.itemsize < self.dtype.itemsize
        is_stepped = any(id(param) in params for param in self.stepped)
        if not (self.offloads and is_narrower and is_stepped):
            return {}
        flat = self.shard_casts.memory(0, self.flat_param.data, self.compute_dtype, pins=self.pins)
        casts = self.pieces_of(flat) if self.use_orig_params else [flat]
        pairs = zip(self.stepped, casts, strict=True)
        return {id(param): cast for param, cast in pairs if cast is not None}

    def record_cast_shards(self, params: Collection[int]) -> None:
        written = (index for index, param in enumerate(self.stepped) if id(param) in params)
        self.shard_casts.record(written, self._shard_versions())

    def _shard_versions(self) -> ShardVersions:
        flat, address = self.flat_param._version, self.flat_param.data_ptr()
        return ShardVersions(self.stepped, [(flat, address, param._version) for param in self.stepped])

    def _current_cast(self, dtype: torch.dtype) -> Tensor | None:
        """Return the cast of the flat shard if it has this dtype and the values of all parameters."""
        current = self.shard_casts.current(self._shard_versions)
        if not current or self.shard_casts.tensors[0].dtype is not dtype:
            return None
        is_complete = all(index in current for index, param in enumerate(self.stepped) if param.numel())
        return self.shard_casts.tensors[0] if is_complete else None

    # All-gathers

    def begin_gather(self, dtype: torch.dtype, *, reads_casts: bool) -> AllGatherRequest | None:
        unsharded = self.unsharded(dtype)
        unsharded.allocate()
        if unsharded.aliases_shard:
            return None
        written = unsharded.record_filled(self.versions)
        cast = self._current_cast(unsharded.flat.dtype) if reads_casts else None
        shard = self.flat_param.data if cast is None else cast
        if self.pins and shard.dtype is not unsharded.flat.dtype:
            # Cast on the device: a cast on the host blocks it, and its result is not pinned.
            shard = to_device(shard, self.device)
        if self.process_groups.shard is None:
            copy_into_(unsharded.flat, shard)
            return None
        local = to_device(shard, self.device, unsharded.flat.dtype)
        return AllGatherRequest(self.process_groups.shard, unsharded.flat, local, written)

    def end_gather(self, request: AllGatherRequest) -> None:
        """Do nothing, because the gathered memory is the unsharded buffer."""

    @torch.no_grad()
    def gather_like(self, shard: Tensor, name: str) -> Tensor:
        """Return all elements [padded_numel] of a tensor that is sharded like the flat parameter.

        Collectives: like unsharding the unit `name`.
        """
        if self.process_groups.shard is None:
            return shard
        return all_gathered(shard.to(self.device), self.process_groups, self.process_groups.shard, name)

    @torch.no_grad()
    def gather_runs(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the runs of a sharded flat parameter in order: the start in the unsharded buffer, and the elements.

        A rank holds at most an eighth of the buffer at a time, or 8 MiB if that is more. Every rank must consume
        all of the runs.

        Collectives: up to eight all-gathers, like unsharding the unit `name`.
        """
        shard, layout, group = self.flat_param.data, self.layout, self.process_groups.shard
        assert group is not None
        fewest = -(-_LEAST_RUN_BYTES // (self.dtype.itemsize * layout.world))
        width = max(-(-layout.shard_numel // _MOST_RUNS), fewest, 1)
        for first in range(0, layout.shard_numel, width):
            piece = all_gathered(
                shard[first : first + width].to(self.device), self.process_groups, group, name
            )
            for rank, run in enumerate(piece.view(layout.world, -1)):
                yield rank * layout.shard_numel + first, run


def flat_param_groups(
    managed: Sequence[ManagedParam], groups: Groups, config: Config, device: torch.device
) -> list[FlatParamGroup]:
    """Return a group for each dtype.

    Frozen parameters have their own groups, which need no memory for gradients.
    """
    by_dtype: dict[tuple[torch.dtype, bool], list[ManagedParam]] = {}
    for param in managed:
        by_dtype.setdefault((param.parameter.dtype, param.parameter.requires_grad), []).append(param)
    flat_params: list[FlatParamGroup] = []
    # Trained parameters come first, because some users read only the first flat parameter of a unit.
    for (dtype, _), params in sorted(by_dtype.items(), key=lambda item: not item[0][1]):
        itemsize = (config.precision.param_dtype or dtype).itemsize
        alignment = aligned_elements(itemsize) if config.use_orig_params else 1
        shapes = [(p.info.name, p.parameter.shape, _dense_stride(p.parameter)) for p in params]
        layout = layout_of(shapes, groups.shard_size, alignment)
        flat_params.append(FlatParamGroup(params, layout, groups, config, device))
    return flat_params


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's stride if it fills its memory without gaps, else the contiguous stride."""
    return torch.empty_like(tensor, device="meta").stride()
