"""Unsharded elements of a flat parameter: storage that is freed and allocated again, and views for the forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.distributed.fsdp._layout.flat_slots import FlatLayout, Slot
from impl.distributed.fsdp._params.param_registration import ParamInfo
from impl.distributed.fsdp._params.tensor_parallel import local_of


class UnshardedBuffer:
    """All elements in one dtype: temporary memory `flat` [padded_numel], and permanent `views` of it."""

    def __init__(
        self,
        layout: FlatLayout,
        param_infos: Sequence[ParamInfo],
        dtype: torch.dtype,
        device: torch.device,
        over: Tensor | None = None,
    ) -> None:
        self.aliases_shard = over is not None
        self._slots = layout.slots
        self._param_infos = param_infos
        self.flat = torch.empty(layout.padded_numel, dtype=dtype, device=device) if over is None else over
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        pairs = zip(param_infos, layout.slots, strict=True)
        self.views = [info.wrap_local(view_into(self.flat, slot)) for info, slot in pairs]
        # Gathers write without autograd's knowledge, so any change of these versions was a write to a parameter.
        self._versions = [view._version for view in self.views]
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

    def set_requires_grad(self, wants_grad: list[bool]) -> None:
        """Set `requires_grad` of each view, or one value for all of them."""
        if wants_grad == self._requires_grad:
            return
        self._requires_grad = wants_grad
        for index, view in enumerate(self.views):
            # functorch's transforms refuse the method `requires_grad_`.
            view.requires_grad = wants_grad[index if len(wants_grad) > 1 else 0]
        self.trainable = [view for view in self.views if view.requires_grad]
        self.has_frozen = len(self.trainable) < len(self.views)

    def alias(self, shard: Tensor) -> None:
        """Use the new memory of the shard. Only for a buffer that aliases the shard."""
        self.flat = shard
        self._storage = shard.untyped_storage()
        with torch.inference_mode(False), torch.no_grad():
            for view, slot in zip(self.views, self._slots, strict=True):
                local_of(view).data = view_into(shard, slot)

    def allocate(self) -> None:
        if not self.is_live:
            self._storage.resize_(self._nbytes)
            self.is_live = True

    def free(self) -> None:
        if self.is_live and not self.aliases_shard:
            self._storage.resize_(0)
            self.is_live = False

    def is_filled_from(self, versions: list[int]) -> bool:
        return self._filled_from == versions

    def fill_from(self, versions: list[int]) -> list[int]:
        """Record that the elements come from a shard with these versions. Return the indices of changed views.

        Graphs of earlier values see a change in place, and autocast casts the changed values again.
        """
        before, self._filled_from = self._filled_from, versions
        if before == versions:
            return []
        changed = [*range(len(self.views))]
        # Only single parameters were written to.
        if before[:1] == versions[:1]:
            changed = [index for index in changed if before[1 + index] != versions[1 + index]]
        torch.autograd.graph.increment_version([self.views[index] for index in changed])
        for index in changed:
            self._versions[index] += 1
        # Autocast keeps casts of leaves until its region ends, whatever their versions.
        torch.clear_autocast_cache()
        return changed

    def take_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the views and clear `.grad`."""
        grads = [view.grad for view in self.views]
        for view in self.trainable:
            view.grad = None
        if any(grad is not None and grad.requires_grad for grad in grads):
            raise RuntimeError("FSDP does not support gradients of gradients")
        grads = [info.local_part(grad) for info, grad in zip(self._param_infos, grads, strict=True)]
        return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]

    def changed(self) -> str | None:
        """Return the name of a view that was written to since the last call, or None."""
        if self.aliases_shard:
            return None
        now = [view._version for view in self.views]
        if now == self._versions:
            return None
        index = next(i for i, pair in enumerate(zip(now, self._versions, strict=True)) if pair[0] != pair[1])
        self._versions = now
        return self._slots[index].name


def view_into(flat: Tensor, slot: Slot) -> Tensor:
    """Return a tensor with the slot's shape over the buffer's memory, which autograd does not treat as a view."""
    view = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return view.set_(flat.untyped_storage(), flat.storage_offset() + slot.start, slot.shape, slot.stride)
