"""`.grad` of a group of DTensors: what backwards leave, reduced or not.

W = ranks that the group is sharded over, S = elements of one rank's part of what is reduced, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._comm.collectives import Reduction
from impl.distributed.fsdp._comm.desync.monitor import WITHOUT
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.grad_dtypes import promoted
from impl.distributed.fsdp._layout.group_options import GroupOptions
from impl.distributed.fsdp._layout.sharded_param import ShardedParam
from impl.distributed.fsdp._layout.unreduced_state import UnreducedState
from impl.distributed.fsdp._layout.unsharded_params import UnshardedParams
from impl.distributed.fsdp._params.param_group import NewBuffer
from impl.kernels import copy_to_host_async


class Reduced(Protocol):
    """The group that they are of."""

    params: list[ShardedParam]
    groups: Groups
    options: GroupOptions
    device: torch.device
    offloads: bool
    pins: bool
    reduction: Reduction
    unsharded_params: UnshardedParams | None

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def reduce_dtype(self) -> torch.dtype: ...
    def drop_parts(self) -> None: ...


class DTensorGradients:
    """`.grad` of the sharded parameters, and what was not reduced yet."""

    def __init__(self, group: Reduced) -> None:
        self._group = group
        self._unreduced: list[Tensor | None] = []  # of all parameters, taken aside from the unsharded ones
        self._reduced: list[tuple[list[ShardedParam], Tensor]] = []  # of this backward, not shown yet
        self._were_reduced = False  # in this backward
        self._on_the_way = group.params  # whose gradients the last input had
        self._state = UnreducedState()

    def refuse_optimizers(self) -> None: ...

    def forget_if_cleared(self) -> None: ...

    def are_there(self) -> bool:
        return any(param.sharded.grad is not None for param in self._group.params)

    def still_wait(self) -> bool:
        waits = any(grad is not None for grad in self._unreduced) and not self._state.is_on_the_way
        return waits or self.owes_zeros()

    def waiting(self) -> list[tuple[str, nn.Parameter]]:
        group, unsharded = self._group, self._group.unsharded_params
        if unsharded is None:
            return []
        aside = [] if self._state.is_on_the_way else self._unreduced
        waits = [view.grad is not None for view in unsharded.views]
        for index, grad in enumerate(aside):
            waits[index] |= grad is not None
        if group.reduction.partial is not None:
            waits = [param.sharded.requires_grad for param in group.params]
        return [
            (param.name, param.sharded) for param, is_so in zip(group.params, waits, strict=True) if is_so
        ]

    def owes_zeros(self) -> bool:
        group = self._group
        took_part = group.unsharded_params is not None and any(
            param.sharded.requires_grad for param in group.params
        )
        return group.options.reduces_unused and took_part and not self._were_reduced

    def begin_backward(self) -> None:
        """What earlier backwards left unreduced goes aside, so that what is there came in this one."""
        if self._state.is_partial:
            names = [param.name for param in self._group.params]
            raise self._state.partial_gradients(names, "drop them by reset_iter_state() of the root")
        unsharded = self._group.unsharded_params
        if unsharded is not None and any(view.grad is not None for view in unsharded.views):
            self._add_to_unreduced(unsharded.take_gradients())
        if unsharded is not None:
            unsharded.take_gradients_as_computed()

    def abandon_backward(self) -> None:
        self._forget_reduced()
        if self._group.unsharded_params is not None:
            self._group.unsharded_params.take_gradients_as_shown()
        if self._state.abandon_backward():
            self._forget_unreduced()

    def forget(self) -> None:
        """Whatever was not shown, as after an exception."""
        self._forget_unreduced()
        self._forget_reduced()
        unsharded = self._group.unsharded_params
        if unsharded is not None:
            unsharded.take_gradients()
        self._group.reduction.partial = None

    def accumulate_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        self._state.note_added(to_earlier=bool(self._unreduced))
        self._add_to_unreduced(grads)

    def _add_to_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        self._unreduced = self._added_to_unreduced(grads)

    def _added_to_unreduced(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        unsharded, earlier = self._group.unsharded_params, self._unreduced or [None] * len(grads)
        assert unsharded is not None
        triples = zip(earlier, grads, unsharded.grad_dtypes, strict=True)
        return [_added(one, grad, dtype) for one, grad, dtype in triples]

    def reduce_input(
        self, grads: Sequence[Tensor | None], dtype: torch.dtype | None, new_buffer: NewBuffer
    ) -> Tensor:
        group, unsharded = self._group, self._group.unsharded_params
        assert unsharded is not None
        if self._unreduced and not self._state.is_on_the_way:
            grads = self._added_to_unreduced(grads)
            self._state.is_on_the_way = True  # should this backward raise, the other ones count
        if group.options.reduces_unused:
            grads = [
                torch.zeros(param.shape, dtype=grad_dtype or group.compute_dtype, device=group.device)
                if grad is None and param.sharded.requires_grad
                else grad
                for param, grad, grad_dtype in zip(group.params, grads, unsharded.grad_dtypes, strict=True)
            ]
        dtype = dtype or self._dtype_to_reduce(grads, unsharded.grad_dtypes)
        pairs = [(param, grad) for param, grad in zip(group.params, grads, strict=True) if grad is not None]
        self._note_reduced([param for param, _ in pairs])
        world = group.groups.shard_size
        numel = world * sum(param.padded_numel for param, _ in pairs)
        custom = group.reduction.comm
        if custom is None:
            buffer, _ = new_buffer(numel, dtype, _alone)
        else:
            buffer = custom.allocate((numel,), dtype=dtype, device=group.device)
        rows = [param.rows(grad) for param, grad in pairs if grad.numel()]
        if len({row.dtype for row in rows}) > 1:  # the operator takes one, and rounds it to the buffer's
            rows = [row.to(dtype) for row in rows]
        if rows:  # the operator takes none without elements
            torch._chunk_cat(rows, 0, world, out=buffer.view(world, -1))
        return buffer

    def _dtype_to_reduce(
        self, grads: Sequence[Tensor | None], grad_dtypes: Sequence[torch.dtype | None]
    ) -> torch.dtype:
        pairs = zip(grads, grad_dtypes, strict=True)
        dtypes = {grad_dtype or grad.dtype for grad, grad_dtype in pairs if grad is not None}
        partial = self._group.reduction.partial
        return promoted(dtypes if partial is None else dtypes | {partial.dtype})

    def _note_reduced(self, params: list[ShardedParam]) -> None:
        """Ranks whose gradients are of other parameters would add up what does not belong together."""
        if params != self._on_the_way:
            self._on_the_way = params
            came = set(params)
            missing = [param.name for param in self._group.params if param not in came]
            self._group.reduction.without = WITHOUT + ", ".join(missing) if missing else ""

    def add(self, reduced: Tensor) -> None:
        """Shown at the end of the backward; at once where there are hooks that wait for it, such as optimizers.

        Sync: none where memory is pinned: before anything is shown the host waits, once for all units.
        """
        group, params = self._group, self._on_the_way
        self._were_reduced = True
        has_hooks = any(param.sharded._post_accumulate_grad_hooks for param in params)
        reduced = self._as_shown(params, reduced) if group.offloads or has_hooks else reduced
        if group.offloads:
            reduced = copy_to_host_async(reduced) if group.pins and not has_hooks else reduced.to("cpu")
        if has_hooks:
            self._show(params, reduced)
            self._forget_unreduced()  # which is in it, and counts even if this backward raises
        else:
            self._reduced.append((params, reduced))

    def end_backward(self, synced: bool) -> None:
        del synced
        if self._state.end_backward():
            self._forget_unreduced()
        self._show_unreduced()
        reduced = list(self._reduced)
        self._forget_reduced()
        for params, flat in reduced:
            self._show(params, self._as_shown(params, flat))
        if self._group.options.reshards_after_backward:
            self._group.drop_parts()  # of what this backward did not use

    def _as_shown(self, params: Sequence[ShardedParam], flat: Tensor) -> Tensor:
        """Cast all gradients at once, if those of all parameters have one dtype."""
        dtypes = {param.grad_dtype for param in params}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return flat if dtype is None else flat.to(dtype)

    def _forget_reduced(self) -> None:
        self._reduced.clear()
        self._were_reduced = False

    def _forget_unreduced(self) -> None:
        self._unreduced = []
        self._state.forget()

    def _show_unreduced(self) -> None:
        """On the unsharded parameters, where torch leaves it too unless it is in another dtype."""
        unsharded = self._group.unsharded_params
        if unsharded is None or not self._unreduced:
            return
        if all(
            grad is None or view.grad_dtype in (None, grad.dtype)
            for grad, view in zip(self._unreduced, unsharded.views, strict=True)
        ):
            params = self._group.params
            for param, view, grad in zip(params, unsharded.views, self._unreduced, strict=True):
                view.grad = None if grad is None else param.info.shown(grad)
            self._unreduced = []

    @torch.no_grad()
    def _show(self, params: Sequence[ShardedParam], flat: Tensor) -> None:
        start = int(flat.storage_offset())
        for param in params:
            sharded, mine = param.sharded, param.in_grad_dtype(param.part_in(flat, start))
            start += param.padded_numel
            grad, held = param.hooked(param.gradient(mine)), sharded.grad
            if held is None:
                sharded.grad = grad
            else:
                held._local_tensor.add_(grad._local_tensor)
            if sharded._post_accumulate_grad_hooks:
                for hook in list(sharded._post_accumulate_grad_hooks.values()):
                    hook(sharded)


def _added(earlier: Tensor | None, grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return the sum in `dtype`, or in that of the first gradient if there is none."""
    if grad is None:
        return earlier
    if earlier is None:
        return grad if dtype is None else grad.to(dtype)
    return (earlier + grad).to(dtype or earlier.dtype)


def _alone(buffer: Tensor) -> list[Tensor]:
    return [buffer]
