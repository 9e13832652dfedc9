"""`.grad` of a group of DTensors: the results of backwards, reduced or not.

W = ranks that the group is sharded over, S = elements of one rank's part of what is reduced, padding included.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from impl._names import describe_names
from impl.distributed.fsdp._comm.collectives import PartialSum, Reduction
from impl.distributed.fsdp._comm.desync.monitor import WITHOUT
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.grad_dtypes import promoted
from impl.distributed.fsdp._layout.group_options import GroupOptions
from impl.distributed.fsdp._layout.sharded_param import ShardedParam
from impl.distributed.fsdp._layout.unsharded_params import UnshardedParams
from impl.distributed.fsdp._params.autograd import call_hook
from impl.distributed.fsdp._params.param_group import BackwardJournal, NewBuffer, incomplete_gradients
from impl.kernels import copy_to_host_async, keep_for_current_stream
from impl.optim._held_gradients import HeldGradient, HeldGradients

# From torch 2.15 on, `reset_iter_state` clears `.grad` too.
_RESET_CLEARS_GRAD = torch.__version__ >= "2.15.dev0"


class GradientGroup(Protocol):
    """Group of parameters with these gradients."""

    params: list[ShardedParam]
    process_groups: Groups
    options: GroupOptions
    device: torch.device
    offloads: bool
    pins: bool
    reduction: Reduction
    unsharded_params: UnshardedParams | None
    syncs: bool

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def reduce_dtype(self) -> torch.dtype: ...
    def discard_post_forward_shards(self) -> None: ...


class DTensorGradients:
    """`.grad` of the sharded parameters, and gradients that are not reduced yet."""

    def __init__(self, group: GradientGroup) -> None:
        self.journal = BackwardJournal()
        self._group = group
        # Gradients of all parameters, moved here from the unsharded parameters.
        self._unreduced: list[Tensor | None] = []
        # Whether they include some gradients of a failed backward.
        self._is_incomplete = False
        # Reduced gradients of this backward, not in `.grad` yet.
        self._reduced: list[tuple[list[ShardedParam], Tensor]] = []
        self._were_reduced = False  # reset at the end of each backward
        self._reduced_params = group.params  # parameters with gradients in the last reduction
        # Unreduced gradients before the running microbatch, until they are reduced.
        self._before_microbatch: list[Tensor | None] = []
        self._earlier_keys: list[Hashable] = []  # keys of them, once they were reduced

    def check_optimizers(self) -> None: ...

    def forget_if_cleared(self) -> None: ...

    def exist_on_any_rank(self) -> bool:
        return any(param.sharded.grad is not None for param in self._group.params)

    def update_unreduced(self) -> bool:
        waits = any(grad is not None for grad in (*self._unreduced, *self._before_microbatch))
        return waits or self.must_reduce_zeros() or self._must_reduce_partial()

    def _must_reduce_partial(self) -> bool:
        """Return whether this backward reduces over replicas, but has not yet done so with earlier partial sums."""
        reduction = self._group.reduction
        return (
            reduction.partial_sum is not None and not reduction.defers_all_reduce and not self._were_reduced
        )

    def _check_complete(self) -> None:
        if self._is_incomplete:
            names = [param.name for param in self._group.params]
            raise incomplete_gradients(names, "drop them by reset_iter_state() of the root")

    def unsynchronized(self) -> list[tuple[str, nn.Parameter]]:
        group, unsharded = self._group, self._group.unsharded_params
        if unsharded is None:
            return []
        waits = [view.grad is not None for view in unsharded.views]
        for index, grad in enumerate(self._unreduced):
            waits[index] |= grad is not None
        if group.reduction.partial_sum is not None:
            waits = [param.sharded.requires_grad for param in group.params]
        return [
            (param.name, param.sharded) for param, is_so in zip(group.params, waits, strict=True) if is_so
        ]

    def must_reduce_zeros(self) -> bool:
        group = self._group
        was_used = group.unsharded_params is not None and any(
            param.sharded.requires_grad for param in group.params
        )
        return group.options.reduces_unused and was_used and not self._were_reduced

    def begin_backward(self) -> None:
        """Set gradients that earlier backwards left unreduced aside, so that new gradients belong to this backward."""
        self._check_complete()
        self.set_unreduced_aside()
        unsharded = self._group.unsharded_params
        if unsharded is not None:
            unsharded.accumulates = bool(self._unreduced) or not self._group.syncs
            unsharded.allow_wider_gradients()
            self.journal.record(unsharded.restore_grad_dtypes)

    def set_unreduced_aside(self) -> None:
        """Take unreduced gradients of earlier backwards from the unsharded parameters."""
        unsharded = self._group.unsharded_params
        if unsharded is None or all(view.grad is None for view in unsharded.views):
            return
        grads = unsharded.take_gradients()
        # No cast, because a gather of cast parameters calls this on GATHER. Autograd has cast the gradients already.
        self._unreduced = self._added_to_unreduced(grads) if self._unreduced else grads

    def forget(self) -> None:
        """Drop all gradients that are not in `.grad`, for example after an exception."""
        self._forget_unreduced()
        self._forget_reduced()
        unsharded = self._group.unsharded_params
        if unsharded is not None:
            unsharded.take_gradients()
        self._group.reduction.partial_sum = None
        for param in self._group.params if _RESET_CLEARS_GRAD else ():
            param.sharded.grad = None

    def accumulate_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        self.journal.record(self._mark_incomplete if self._unreduced else self._forget_unreduced)
        self._unreduced = self._added_to_unreduced(grads)

    def _added_to_unreduced(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        unsharded, earlier = self._group.unsharded_params, self._unreduced or [None] * len(grads)
        assert unsharded is not None
        keep_for_current_stream(earlier)
        triples = zip(earlier, grads, unsharded.grad_dtypes, strict=True)
        return [_added(earlier_grad, grad, dtype) for earlier_grad, grad, dtype in triples]

    def reduce_input(
        self, grads: Sequence[Tensor | None], dtype: torch.dtype | None, new_buffer: NewBuffer
    ) -> Tensor:
        group, unsharded = self._group, self._group.unsharded_params
        assert unsharded is not None
        if self._before_microbatch:
            earlier, self._before_microbatch = self._before_microbatch, []
            self._unreduced = self._added_to_unreduced(earlier)
            self._earlier_keys = [(index, False) for index, grad in enumerate(earlier) if grad is not None]
        if self._unreduced:
            self._check_complete()
            grads = self._added_to_unreduced(grads)
            self.journal.record(partial(self._restore_unreduced, self._unreduced))
            self._unreduced = []
        self.journal.record(partial(self._restore_sums, group.reduction.partial_sum))
        if group.options.reduces_unused:
            self._check_dtypes_of_zeros(unsharded.grad_dtypes)
        grads = self._with_zeros(grads, unsharded.grad_dtypes)
        dtype = dtype or self._dtype_to_reduce(grads, unsharded.grad_dtypes)
        pairs = [(param, grad) for param, grad in zip(group.params, grads, strict=True) if grad is not None]
        self._record_reduced([param for param, _ in pairs])
        world = group.process_groups.shard_size
        numel = world * sum(param.padded_numel for param, _ in pairs)
        custom = group.reduction.custom_reduce_scatter
        if custom is None:
            buffer, _ = new_buffer(numel, dtype, _whole_buffer)
        else:
            buffer = custom.allocate((numel,), dtype=dtype, device=group.device)
        try:
            rows = [param.rows(grad) for param, grad in pairs if grad.numel()]
            # The operator takes rows of one dtype only, and rounds them to the buffer's dtype.
            if len({row.dtype for row in rows}) > 1:
                rows = [row.to(dtype) for row in rows]
            # The operator rejects empty tensors.
            if rows:
                torch._chunk_cat(rows, 0, world, out=buffer.view(world, -1))
        except RuntimeError as error:
            _note_sparse(pairs, error)
            raise
        return buffer

    def begin_microbatch(self) -> HeldGradients:
        self._check_complete()
        held = self._take()
        unreduced = [held.get((index, False)) for index in range(len(self._group.params))]
        waits = any(gradient is not None for gradient in unreduced)
        self._before_microbatch = [gradient and gradient.tensor for gradient in unreduced] if waits else []
        self._earlier_keys = []
        return held

    def end_microbatch(self) -> tuple[HeldGradients, list[Hashable]]:
        self._before_microbatch = []
        return self._take(), self._earlier_keys

    def put(self, tensors: Mapping[Hashable, Tensor]) -> None:
        self._before_microbatch = []
        self._forget_unreduced()
        if self._group.unsharded_params is not None:
            self._group.unsharded_params.take_gradients()
        for index, param in enumerate(self._group.params):
            param.sharded.grad = tensors.get((index, True))
        unreduced = [tensors.get((index, False)) for index in range(len(self._group.params))]
        self._unreduced = unreduced if any(grad is not None for grad in unreduced) else []
        self._publish_unreduced()

    def _take(self) -> HeldGradients:
        """Return all gradients by the index of their parameter and whether they are reduced, and leave none."""
        self.set_unreduced_aside()
        unreduced, self._unreduced = self._unreduced, []
        held: HeldGradients = {}
        for index, grad in enumerate(unreduced):
            if grad is not None:
                parts = [(self._group.params[index].sharded, grad)]
                held[index, False] = HeldGradient(grad, parts)
        for index, param in enumerate(self._group.params):
            grad = param.sharded.grad
            if grad is not None:
                param.sharded.grad = None
                held[index, True] = HeldGradient(grad, [(param.sharded, grad)])
        return held

    def _check_dtypes_of_zeros(self, grad_dtypes: Sequence[torch.dtype | None]) -> None:
        """Raise ValueError if a trained parameter has `grad_dtype=None`.

        All ranks raise, because they have the same settings.
        """
        for param, grad_dtype in zip(self._group.params, grad_dtypes, strict=True):
            if grad_dtype is None and param.sharded.requires_grad:
                raise ValueError(
                    "Reducing unused parameters with grad_dtype=None requires an explicit "
                    "MixedPrecisionPolicy.reduce_dtype so every rank can build zero gradients of the same dtype: "
                    f"{param.name}. Set reduce_dtype to the dtype its gradients already have."
                )

    def _with_zeros(
        self, grads: Sequence[Tensor | None], grad_dtypes: Sequence[torch.dtype | None]
    ) -> Sequence[Tensor | None]:
        """Return `grads` with zeros for parameters that must be reduced without a gradient.

        Those are parameters with a partial sum, and with `reduces_unused` all trained ones.
        """
        group, sums = self._group, self._group.reduction.partial_sum
        summed = () if sums is None else sums.numels
        if not group.options.reduces_unused and not summed:
            return grads
        return [
            torch.zeros(param.shape, dtype=grad_dtype or group.compute_dtype, device=group.device)
            if grad is None
            and (param in summed or (group.options.reduces_unused and param.sharded.requires_grad))
            else grad
            for param, grad, grad_dtype in zip(group.params, grads, grad_dtypes, strict=True)
        ]

    def _dtype_to_reduce(
        self, grads: Sequence[Tensor | None], grad_dtypes: Sequence[torch.dtype | None]
    ) -> torch.dtype:
        pairs = zip(grads, grad_dtypes, strict=True)
        dtypes = {grad_dtype or grad.dtype for grad, grad_dtype in pairs if grad is not None}
        sums = self._group.reduction.partial_sum
        return promoted(dtypes if sums is None else dtypes | {sums.values.dtype})

    def _record_reduced(self, params: list[ShardedParam]) -> None:
        """Record the reduced parameters. Ranks that reduce different parameters would add unrelated elements."""
        self._group.reduction.numels = {param: param.padded_numel for param in params}
        if params != self._reduced_params:
            self._reduced_params = params
            came = set(params)
            missing = [param.name for param in self._group.params if param not in came]
            self._group.reduction.missing_suffix = WITHOUT + ", ".join(missing) if missing else ""

    def add(self, reduced: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Add a reduced shard. It is published at the end of the backward, or at once if parameters have hooks.

        Sync: none if memory is pinned. The host waits once for all units before gradients are published.
        """
        group, params = self._group, self._reduced_params
        self._were_reduced = True
        has_hooks = any(param.sharded._post_accumulate_grad_hooks for param in params)
        # Cast here, so that `.grad` is memory of the reduction's stream, which waits for the step before it reuses it.
        reduced = self._in_grad_dtype(params, reduced)
        if group.offloads:
            reduced = copy_to_host_async(reduced) if group.pins and not has_hooks else reduced.to("cpu")
        if has_hooks:
            self._publish(params, reduced)
            # `.grad` includes the earlier gradients, even if this backward raises.
            self.journal.close()
        else:
            self._reduced.append((params, reduced))
        self.journal.record(self._forget_reduced)
        return self._final_shards(params, reduced) if group.offloads and not has_hooks else []

    def _final_shards(self, params: Sequence[ShardedParam], flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the shards in a reduced result with their parameters, or nothing if `.grad` will be something else."""
        if len(self._reduced) > 1 or any(param.sharded.grad is not None for param in params):
            return []
        if any(
            param.sharded._backward_hooks or param.grad_dtype not in (None, flat.dtype) for param in params
        ):
            return []
        start, pairs = int(flat.storage_offset()), list[tuple[Tensor, Tensor]]()
        for param in params:
            pairs.append((param.sharded, param.shard_in(flat, start)))
            start += param.padded_numel
        return pairs

    def end_backward(self, synced: bool) -> None:
        del synced
        self.journal.close()
        self._publish_unreduced()
        reduced = list(self._reduced)
        self._forget_reduced()
        for params, flat in reduced:
            self._publish(params, flat)
        if self._group.options.reshards_after_backward:
            self._group.discard_post_forward_shards()  # shards that this backward did not use

    def _in_grad_dtype(self, params: Sequence[ShardedParam], flat: Tensor) -> Tensor:
        """Cast all gradients at once, if those of all parameters have one dtype."""
        dtypes = {param.grad_dtype for param in params}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return flat if dtype is None else flat.to(dtype)

    def _forget_reduced(self) -> None:
        self._reduced.clear()
        self._were_reduced = False

    def _forget_unreduced(self) -> None:
        self._unreduced = []
        self._is_incomplete = False

    def _restore_unreduced(self, unreduced: list[Tensor | None]) -> None:
        self._unreduced = unreduced

    def _restore_sums(self, sums: PartialSum | None) -> None:
        self._group.reduction.partial_sum = sums

    def _mark_incomplete(self) -> None:
        self._is_incomplete = bool(self._unreduced)

    def _publish_unreduced(self) -> None:
        """Publish unreduced gradients on the unsharded parameters, where torch keeps them unless the dtype differs."""
        unsharded = self._group.unsharded_params
        if unsharded is None or not self._unreduced:
            return
        if all(
            grad is None or view.grad_dtype in (None, grad.dtype)
            for grad, view in zip(self._unreduced, unsharded.views, strict=True)
        ):
            params = self._group.params
            for param, view, grad in zip(params, unsharded.views, self._unreduced, strict=True):
                view.grad = None if grad is None else param.info.wrap_local(grad)
            self._unreduced = []

    @torch.no_grad()
    def _publish(self, params: Sequence[ShardedParam], flat: Tensor) -> None:
        start = int(flat.storage_offset())
        for param in params:
            sharded, local = param.sharded, param.in_grad_dtype(param.shard_in(flat, start))
            start += param.padded_numel
            if sharded._backward_hooks:
                local = param.apply_hooks(param.gradient(local))
            if sharded.grad is None:
                sharded.grad = param.gradient(local)
            else:
                sharded.grad._local_tensor.add_(local)
            if sharded._post_accumulate_grad_hooks:
                for hook in list(sharded._post_accumulate_grad_hooks.values()):
                    call_hook(hook, sharded, param.name)


def _note_sparse(pairs: Sequence[tuple[ShardedParam, Tensor]], error: RuntimeError) -> None:
    names = [param.name for param, grad in pairs if grad.is_sparse]
    if names:
        error.add_note(
            f"{describe_names(names)} got a sparse gradient, which fully_shard cannot reduce; build the embedding with "
            "sparse=False, or pass its weight in ignored_params"
        )


def _added(earlier: Tensor | None, grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return the sum in `dtype`. If that is None, a sum has the dtype of `earlier`."""
    if grad is None:
        return earlier
    if earlier is None:
        return grad if dtype is None else grad.to(dtype)
    return (earlier + grad).to(dtype or earlier.dtype)


def _whole_buffer(buffer: Tensor) -> list[Tensor]:
    return [buffer]
