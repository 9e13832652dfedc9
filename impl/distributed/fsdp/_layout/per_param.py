"""The layout of fully_shard: each parameter is a DTensor, and those of a group travel side by side in one buffer.

W = ranks that the group is sharded over, S = elements of one rank's part of what travels, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._collectives import Reduction
from impl.distributed.fsdp._groups import Groups
from impl.distributed.fsdp._layout.sharded_param import ShardedParam, offsets
from impl.distributed.fsdp._param_group import Gathering, NewBuffer
from impl.distributed.fsdp._param_registration import ParamRegistration


@dataclass
class GroupOptions:
    """What may be changed between steps; dtypes are None where the parameters' own serve."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshards_after_forward: bool | None = None  # None: unless it is the root's
    reshards_after_backward: bool = True
    reduces_unused: bool = False  # zeros take the place of gradients that did not come
    all_gather: Any = None  # communication of the user's own: `allocate`, and a call


class UnshardedParams:
    """All parameters of a group, over one storage that comes and goes."""

    aliases_shard = False
    is_given_up = False

    def __init__(
        self, params: Sequence[ShardedParam], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> None:
        self._params = params
        numels = [param.world * param.padded_numel for param in params]
        # In bytes, each parameter where any dtype may begin.
        starts = offsets(
            [-(-numel * dtype.itemsize // 16) * 16 for numel, dtype in zip(numels, dtypes, strict=True)]
        )
        self._nbytes = starts[-1]
        held = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        self._storage = held.untyped_storage()
        self.runs: list[Tensor] = []  # [W * n] of each
        self.views: list[nn.Parameter] = []
        for param, numel, dtype, start in zip(params, numels, dtypes, starts, strict=False):
            first = start // dtype.itemsize
            run = torch.empty(0, dtype=dtype, device=device)
            self.runs.append(run.set_(self._storage, first, (numel,), (1,)))
            view = torch.empty(0, dtype=dtype, device=device)
            view.set_(self._storage, first, param.shape, param.stride)
            self.views.append(nn.Parameter(view, requires_grad=param.sharded.requires_grad))
        self._filled_from: tuple[list[Tensor], list[Any]] = ([], [])
        self.trainable: list[Tensor] = []
        self.has_frozen = False
        self.free()

    @property
    def memory(self) -> tuple[int]:
        return (self._storage._cdata,)

    def follow_requires_grad(self) -> None:
        for param, view in zip(self._params, self.views, strict=True):
            if view.requires_grad != param.sharded.requires_grad:
                view.requires_grad = param.sharded.requires_grad
        self.trainable = [view for view in self.views if view.requires_grad]
        self.has_frozen = len(self.trainable) < len(self.views)

    def note_filled(self) -> None:
        """It has what the parameters hold now."""
        self._filled_from = [param.local for param in self._params], [param.version for param in self._params]

    def is_filled(self) -> bool:
        """Whether it has what the parameters hold now; a part may be another tensor."""
        parts, versions = self._filled_from
        return versions == [param.version for param in self._params] and all(
            part is param.local for part, param in zip(parts, self._params, strict=True)
        )

    def allocate(self) -> None:
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        self._storage.resize_(0)

    def take_gradients(self) -> list[Tensor | None]:
        grads = [view.grad for view in self.views]
        for view in self.views:
            view.grad = None
        return grads

    def changed(self) -> None:
        """Changes in place during a forward are the module's own, as in torch."""


class DTensorGroup:
    """
    Args:
        params: already cut; of them those that are trained have one dtype.
        groups: the ranks to shard over and to replicate over.
        device: where it is computed with.
        offloads: the parameters, their gradients and the optimizer's states lie on the CPU.
    """

    is_tracked = False  # DTensors tell who holds them; a module that is moved has to own its parameters alone
    shows_what_is_kept = True

    def __init__(
        self,
        params: Sequence[ShardedParam],
        groups: Groups,
        options: GroupOptions,
        device: torch.device,
        offloads: bool,
    ) -> None:
        self.params = list(params)
        self.groups = groups
        self.options = options
        self.device = device
        self.offloads = offloads
        self.syncs = True
        self.reduction = Reduction(groups)
        self.gradients = DTensorGradients(self)
        self.names = [param.name for param in params]
        self._registration = ParamRegistration([param.info for param in params], as_parameters=True)
        self._unsharded: UnshardedParams | None = None
        self._is_shown = False
        self.use_sharded_views()

    # dtypes

    @property
    def dtype(self) -> torch.dtype:
        trained = (param.dtype for param in self.params if param.sharded.requires_grad)
        return next(trained, self.params[0].dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.options.param_dtype or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.options.reduce_dtype or self.compute_dtype

    @property
    def stepped(self) -> list[nn.Parameter]:
        return [param.sharded for param in self.params]

    def _dtype_of(self, param: ShardedParam) -> torch.dtype:
        """That it is computed with: integers keep their own."""
        wanted = self.options.param_dtype
        return wanted if wanted is not None and param.dtype.is_floating_point else param.dtype

    # when it is unsharded

    def keeps_after_forward(self, is_outermost: bool, awaits_backward: bool) -> bool:
        del awaits_backward
        if _is_in_backward():  # recomputed for it, which will want the parameters
            return True
        reshards = self.options.reshards_after_forward
        return is_outermost if reshards is None else not reshards

    def frees_in_backward(self) -> bool:
        return self.options.reshards_after_backward

    # what the user changes

    def write_back_changes(self) -> bool:
        if self._is_shown:
            return False
        was_changed = False
        for index, found in self._registration.registered():
            param = self.params[index]
            if found is not param.sharded and isinstance(found, nn.Parameter):
                param.sharded = found
                was_changed = True
        return was_changed

    def is_up_to_date(self, dtype: torch.dtype) -> bool:
        del dtype
        return self._unsharded is not None and self._unsharded.is_filled()

    def check_device(self, compute_device: torch.device) -> None:
        del compute_device
        on_meta = [param.name for param in self.params if param.sharded.device.type == "meta"]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, "
                f"but the following were still on meta device: {on_meta}\n"
                "For example, call module.to_empty(device) to materialize to device and "
                "call module.reset_parameters() on each module to initialize values."
            )
        elsewhere = [(p.name, p.sharded.device) for p in self.params if p.sharded.device.type != "cpu"]
        if self.offloads and elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                'For example, load a CPU state dict or call module.to_empty(device="cpu"). '
                f"Found following parameters on non-CPU device: {elsewhere}\n"
            )

    def check_dtypes(self) -> None:
        """
        Raises:
            AssertionError: what is trained has several dtypes.
        """
        dtypes = {param.dtype for param in self.params if param.sharded.requires_grad}
        if len(dtypes) > 1:
            raise AssertionError(f"FSDP expects uniform original parameter dtype but got {dtypes}")

    # gathering

    def unsharded(self, dtype: torch.dtype) -> UnshardedParams:
        del dtype
        dtypes = [self._dtype_of(param) for param in self.params]
        found = self._unsharded
        if found is None or [view.dtype for view in found.views] != dtypes:
            with torch.inference_mode(False), torch.no_grad():
                found = self._unsharded = UnshardedParams(self.params, dtypes, self.device)
        return found

    def begin_gather(self, dtype: torch.dtype) -> Gathering | None:
        unsharded = self.unsharded(dtype)
        unsharded.allocate()
        unsharded.note_filled()
        if self.groups.shard is None:
            for param, run in zip(self.params, unsharded.runs, strict=True):
                param.part_in(run).copy_(param.local)
            return None
        world, rank = self.groups.shard_size, self.groups.shard_rank
        dtypes = {run.dtype for run in unsharded.runs}
        itemsize = 1 if len(dtypes) > 1 else next(iter(dtypes)).itemsize
        travels_as = torch.uint8 if len(dtypes) > 1 else next(iter(dtypes))
        sizes = [
            param.padded_numel * run.itemsize // itemsize
            for param, run in zip(self.params, unsharded.runs, strict=True)
        ]
        total = sum(sizes)
        custom = self.options.all_gather
        if custom is None:
            output = torch.empty(world * total, dtype=travels_as, device=self.device)
        else:
            output = custom.allocate((world * total,), dtype=travels_as, device=self.device)
        mine = output[rank * total : (rank + 1) * total]
        parts = [
            param.part_in(piece.view(run.dtype))
            for param, piece, run in zip(self.params, mine.split(sizes), unsharded.runs, strict=True)
        ]
        torch._foreach_copy_(parts, [param.local for param in self.params])
        gathering = Gathering(self.groups.shard, output, mine, ())
        if custom is None:
            return gathering
        custom(output_tensor=output, input_tensor=mine, group=self.groups.shard, async_op=False)
        self.end_gather(gathering)
        return None

    def end_gather(self, gathering: Gathering) -> None:
        unsharded, world = self._unsharded, self.groups.shard_size
        assert unsharded is not None
        gathered = gathering.output.view(world, -1)
        sizes: list[int] = []
        outs: list[Tensor] = []
        later: list[tuple[ShardedParam, Tensor, Tensor]] = []  # and where from, and where to
        for param, run in zip(self.params, unsharded.runs, strict=True):
            into = run if param.dim == 0 else torch.empty_like(run)
            if param.dim:
                later.append((param, into, run))
            rows = into.view(gathered.dtype).view(world, -1)
            sizes.append(rows.shape[1])
            outs.append(rows)
        torch.split_with_sizes_copy(gathered, sizes, dim=1, out=outs)
        for param, parts, run in later:
            param.copy_out(parts, run)

    # what modules see

    def use_unsharded_views(self, dtype: torch.dtype) -> UnshardedParams:
        unsharded = self.unsharded(dtype)
        unsharded.follow_requires_grad()
        if not self._is_shown:
            self._registration.register(unsharded.views)
            self._is_shown = True
        return unsharded

    def use_sharded_views(self) -> None:
        self._registration.register([param.sharded for param in self.params])
        self._is_shown = False

    def free(self) -> None:
        if self._unsharded is not None:
            self._unsharded.free()


class DTensorGradients:
    """`.grad` of the sharded parameters, and what was not reduced yet."""

    def __init__(self, group: DTensorGroup) -> None:
        self._group = group
        self._unreduced: list[Tensor | None] = []  # of all parameters, taken aside from the unsharded ones
        self._reduced: list[tuple[list[ShardedParam], Tensor]] = []  # of this backward, not shown yet
        self._on_the_way: list[ShardedParam] = []  # whose gradients the last input had

    def refuse_optimizers(self) -> None: ...

    def forget_if_cleared(self) -> None: ...

    def are_there(self) -> bool:
        return any(param.sharded.grad is not None for param in self._group.params)

    def still_wait(self) -> bool:
        return any(grad is not None for grad in self._unreduced) or self.owes_zeros()

    def owes_zeros(self) -> bool:
        group = self._group
        took_part = group._unsharded is not None and any(
            param.sharded.requires_grad for param in group.params
        )
        return group.options.reduces_unused and took_part and not self._reduced

    def begin_backward(self) -> None:
        """What earlier backwards left unreduced goes aside, so that what is there came in this one."""
        unsharded = self._group._unsharded
        if unsharded is not None and any(view.grad is not None for view in unsharded.views):
            self.accumulate_unreduced(unsharded.take_gradients())

    def abandon_backward(self) -> None:
        self._reduced.clear()

    def forget(self) -> None:
        """Whatever was not shown, as after an exception."""
        self._unreduced = []
        self._reduced.clear()
        unsharded = self._group._unsharded
        if unsharded is not None:
            unsharded.take_gradients()
        self._group.reduction.partial = None

    def accumulate_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        dtype = self._group.options.reduce_dtype
        earlier = self._unreduced or [None] * len(grads)
        self._unreduced = [
            _sum(one, grad if grad is None or dtype is None else grad.to(dtype))
            for one, grad in zip(earlier, grads, strict=True)
        ]

    def reduce_input(
        self, grads: Sequence[Tensor | None], dtype: torch.dtype, new_buffer: NewBuffer
    ) -> Tensor:
        group = self._group
        if self._unreduced:
            grads = [_sum(one, grad) for one, grad in zip(self._unreduced, grads, strict=True)]
            self._unreduced = []
        if group.options.reduces_unused:
            grads = [
                torch.zeros(param.shape, dtype=group.compute_dtype, device=group.device)
                if grad is None and param.sharded.requires_grad
                else grad
                for param, grad in zip(group.params, grads, strict=True)
            ]
        pairs = [(param, grad) for param, grad in zip(group.params, grads, strict=True) if grad is not None]
        self._on_the_way = [param for param, _ in pairs]
        world = group.groups.shard_size
        numel = world * sum(param.padded_numel for param, _ in pairs)
        custom = group.reduction.comm
        if custom is None:
            buffer, _ = new_buffer(numel, dtype, _alone)
        else:
            buffer = custom.allocate((numel,), dtype=dtype, device=group.device)
        rows = [param.rows(grad) for param, grad in pairs]
        torch._chunk_cat(rows, 0, world, out=buffer.view(world, -1))
        return buffer

    def add(self, reduced: Tensor) -> None:
        self._reduced.append((self._on_the_way, reduced))

    def end_backward(self, synced: bool) -> None:
        self._show_unreduced()
        del synced
        reduced, self._reduced = self._reduced, []
        for params, flat in reduced:
            self._show(params, flat.to(self._group.dtype))

    def _show_unreduced(self) -> None:
        """On the unsharded parameters, where torch leaves it too unless it is in another dtype."""
        unsharded = self._group._unsharded
        if unsharded is None or not self._unreduced:
            return
        if all(
            grad is None or grad.dtype is view.dtype
            for grad, view in zip(self._unreduced, unsharded.views, strict=True)
        ):
            for view, grad in zip(unsharded.views, self._unreduced, strict=True):
                view.grad = grad
            self._unreduced = []

    @torch.no_grad()
    def _show(self, params: Sequence[ShardedParam], flat: Tensor) -> None:
        for param, run in zip(params, flat.split([param.padded_numel for param in params]), strict=True):
            mine: Tensor = param.part_in(run)
            if self._group.offloads:
                mine = mine.to("cpu")
            held: Any = param.sharded.grad
            if held is None:
                param.sharded.grad = param.as_dtensor(mine)
            else:
                held._local_tensor.add_(mine)
            for hook in list((param.sharded._post_accumulate_grad_hooks or {}).values()):
                hook(param.sharded)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _is_in_backward() -> bool:
    number: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore[reportAttributeAccessIssue]  no stub
    return number() != -1


def _alone(buffer: Tensor) -> list[Tensor]:
    return [buffer]
