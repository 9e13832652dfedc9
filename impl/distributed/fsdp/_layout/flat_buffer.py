"""Unsharded elements of a flat parameter: storage that is freed and allocated again, and views for the forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.distributed.fsdp._flat_param import FlatParameter
from impl.distributed.fsdp._layout.flat_slots import FlatLayout, Slot
from impl.distributed.fsdp._params.param_registration import ParamInfo
from impl.distributed.fsdp._params.tensor_parallel import local_of
from impl.kernels import keep_for_current_stream


class UnshardedBuffer:
    """All elements in one dtype: temporary memory `flat` [padded_numel], and permanent `views` of it.

    `flat_param` is another view, which modules have instead of the sharded flat parameter. It is None if modules have
    the user's parameters. `take_gradients` adds its gradient to those of the views.

    Args:
        over: the shard, if the buffer aliases it.
        sharded_flat_param: flat parameter that modules have while it is sharded.
    """

    def __init__(  # noqa: PLR0913  called once
        self,
        layout: FlatLayout,
        param_infos: Sequence[ParamInfo],
        dtype: torch.dtype,
        device: torch.device,
        over: Tensor | None,
        sharded_flat_param: FlatParameter | None,
    ) -> None:
        self.aliases_shard = over is not None
        self._slots = layout.slots
        self._whole = Slot("a flat parameter", (layout.numel,), (1,), 0)
        self._param_infos = param_infos
        self.flat = torch.empty(layout.padded_numel, dtype=dtype, device=device) if over is None else over
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        pairs = zip(param_infos, layout.slots, strict=True)
        self.views: list[Tensor] = [info.wrap_local(view_into(self.flat, slot)) for info, slot in pairs]
        self.flat_param = None if sharded_flat_param is None else self._flat_param_like(sharded_flat_param)
        # Gathers write without autograd's knowledge, so any change of these versions was a write to a parameter.
        self._versions = [tensor._version for tensor in self._tensors]
        self._filled_from: list[int] = []  # versions of the shard
        self.trainable: list[Tensor] = []
        self.has_frozen = True
        self._requires_grad: list[bool] = []
        self.is_live = True
        self.is_invalidated = False  # see `Unsharded` in `_params/param_group.py`
        self.free()

    @property
    def memory(self) -> tuple[int]:
        """Address of the storage."""
        return (self._storage._cdata,)

    def _flat_param_like(self, sharded: FlatParameter) -> FlatParameter:
        """Return the unsharded flat parameter. Hooks that the user registers on it become hooks of `sharded`."""
        flat_param = FlatParameter(view_into(self.flat, self._whole), requires_grad=False)
        flat_param._fqns = sharded._fqns
        flat_param.register_hook = sharded.register_hook
        flat_param.register_post_accumulate_grad_hook = sharded.register_post_accumulate_grad_hook
        return flat_param

    @property
    def _tensors(self) -> list[Tensor]:
        """The views, followed by the flat parameter if modules have it."""
        return self.views if self.flat_param is None else [*self.views, self.flat_param]

    def set_requires_grad(self, wants_grad: list[bool]) -> None:
        """Set `requires_grad` of each view, or one value for all of them."""
        if wants_grad == self._requires_grad:
            return
        self._requires_grad = wants_grad
        for index, tensor in enumerate(self._tensors):
            # functorch's transforms refuse the method `requires_grad_`.
            tensor.requires_grad = wants_grad[index if len(wants_grad) > 1 else 0]
        self.trainable = [tensor for tensor in self._tensors if tensor.requires_grad]
        self.has_frozen = len(self.trainable) < len(self._tensors)

    def alias(self, shard: Tensor) -> None:
        """Use the new memory of the shard. Only for a buffer that aliases the shard."""
        self.flat = shard
        self._storage = shard.untyped_storage()
        with torch.inference_mode(False), torch.no_grad():
            for view, slot in zip(self.views, self._slots, strict=True):
                local_of(view).data = view_into(shard, slot)
            if self.flat_param is not None:
                self.flat_param.data = view_into(shard, self._whole)

    def allocate(self) -> None:
        if not self.is_live:
            self._storage.resize_(self._nbytes)
            self.is_live = True

    def free(self) -> None:
        if self.is_live and not self.aliases_shard:
            self._storage.resize_(0)
            self.is_live = False
            # Autocast keeps casts of leaves until its region ends, which would be those of all units.
            torch.clear_autocast_cache()

    def is_filled_from(self, versions: list[int]) -> bool:
        return self._filled_from == versions

    def record_filled(self, versions: list[int]) -> list[int]:
        """Record that a shard with these versions fills the buffer. Return the indices of changed views.

        Gathers write without autograd's knowledge. So increment the versions of changed views here, and a backward
        through a graph of earlier values raises. Autocast casts the changed values again.
        """
        before, self._filled_from = self._filled_from, versions
        if before == versions:
            return []
        tensors = self._tensors
        changed = [*range(len(tensors))]
        # Only single parameters were written to.
        if before[:1] == versions[:1]:
            changed = [index for index in changed if before[1 + index] != versions[1 + index]]
        torch.autograd.graph.increment_version([tensors[index] for index in changed])
        for index in changed:
            self._versions[index] += 1
        # Autocast keeps casts of leaves until its region ends, whatever their versions.
        torch.clear_autocast_cache()
        return changed[: len(self.views)]

    def follow_versions(self, before: list[int], now: list[int]) -> None:
        """Record that a shard with the versions `now` has the same elements as with the versions `before`."""
        if self._filled_from == before:
            self._filled_from = now

    def lacks_gradients(self) -> bool:
        if any(view.grad is None for view in self.views if view.requires_grad):
            return True
        flat_param = self.flat_param
        if flat_param is None or not flat_param.requires_grad or flat_param.grad is not None:
            return False
        # Most forwards do not compute with it. Each graph that contains it has one more reference to it.
        return flat_param._use_count() > 1  # pyright: ignore[reportAttributeAccessIssue]  torch has no stub for it

    def take_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the views and clear `.grad`. They include the gradient of `flat_param`."""
        grads = [tensor.grad for tensor in self._tensors]
        keep_for_current_stream(map(local_of, grads))
        for tensor in self.trainable:
            tensor.grad = None
        if any(grad is not None and grad.requires_grad for grad in grads):
            raise RuntimeError("FSDP does not support gradients of gradients")
        flat_grad = None if self.flat_param is None else grads.pop()
        grads = [info.local_part(grad) for info, grad in zip(self._param_infos, grads, strict=True)]
        grads = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
        if flat_grad is None:
            return grads
        parts = [view_into(flat_grad.contiguous(), slot) for slot in self._slots]
        return [part if grad is None else grad + part for grad, part in zip(grads, parts, strict=True)]

    def take_written(self) -> str | None:
        """Return the name of a tensor that was written to since the last call, or None."""
        if self.aliases_shard:
            return None
        now = [tensor._version for tensor in self._tensors]
        if now == self._versions:
            return None
        index = next(i for i, pair in enumerate(zip(now, self._versions, strict=True)) if pair[0] != pair[1])
        self._versions = now
        return [*self._slots, self._whole][index].name


def view_into(flat: Tensor, slot: Slot) -> Tensor:
    """Return a tensor with the slot's shape over the buffer's memory, which autograd does not treat as a view."""
    view = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return view.set_(flat.untyped_storage(), flat.storage_offset() + slot.start, slot.shape, slot.stride)


def copy_grads(
    layout: FlatLayout, grads: Sequence[Tensor | None], views: list[Tensor], buffer: Tensor
) -> None:
    """Copy gradients into a buffer [padded_numel] with these `views`, with a cast.

    A missing gradient becomes zeros.
    """
    present = [grad for grad in grads if grad is not None]
    if len(present) == len(views):
        torch._foreach_copy_(views, present)
    else:
        targets = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
        torch._foreach_copy_(targets, present)
        torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])
    for start, stop in layout.gaps:
        buffer[start:stop].zero_()
