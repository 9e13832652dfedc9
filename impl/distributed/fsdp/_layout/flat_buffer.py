"""A flat parameter's elements: storage that comes and goes, and the views over it, which forward computes with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.distributed.fsdp._layout.flat_slots import FlatLayout, Slot
from impl.distributed.fsdp._params.param_registration import ParamInfo
from impl.distributed.fsdp._params.tensor_parallel import local_of


class UnshardedBuffer:
    """All elements in one dtype; `flat` [padded_numel] comes and goes, `views` lie over it for good."""

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
        self.views = [info.shown(view_into(self.flat, slot)) for info, slot in pairs]
        # Gathering writes behind autograd's back, so whatever moves these was a change to a parameter.
        self._versions = [view._version for view in self.views]
        self._filled_from: list[int] = []  # versions of the shard
        self.trainable: list[Tensor] = []
        self.has_frozen = True
        self._requires_grad: list[bool] = []
        self.is_live = True
        self.is_given_up = False  # for another, since the shard was moved or cast
        self.free()

    @property
    def memory(self) -> tuple[int]:
        """The address of its storage."""
        return (self._storage._cdata,)

    def set_requires_grad(self, wants_grad: list[bool]) -> None:
        """Have each view, or all of them, require a gradient or not."""
        if wants_grad == self._requires_grad:
            return
        self._requires_grad = wants_grad
        for index, view in enumerate(self.views):
            # The method is refused inside of functorch's transforms.
            view.requires_grad = wants_grad[index if len(wants_grad) > 1 else 0]
        self.trainable = [view for view in self.views if view.requires_grad]
        self.has_frozen = len(self.trainable) < len(self.views)

    def alias(self, shard: Tensor) -> None:
        """Of one that aliases the shard, which has other memory now."""
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
        """Its elements are those of a shard with these versions: to graphs made of others they are changed in place.

        The numbers of the views that are.
        """
        before, self._filled_from = self._filled_from, versions
        if before == versions:
            return []
        moved = [*range(len(self.views))]
        if before[:1] == versions[:1]:  # by names of parameters alone
            moved = [index for index in moved if before[1 + index] != versions[1 + index]]
        torch.autograd.graph.increment_version([self.views[index] for index in moved])
        for index in moved:
            self._versions[index] += 1
        return moved

    def take_gradients(self) -> list[Tensor | None]:
        """Those of the views, which lose them."""
        grads = [view.grad for view in self.views]
        for view in self.trainable:
            view.grad = None
        if any(grad is not None and grad.requires_grad for grad in grads):
            raise RuntimeError("FSDP does not support gradients of gradients")
        grads = [info.local_part(grad) for info, grad in zip(self._param_infos, grads, strict=True)]
        return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]

    def changed(self) -> str | None:
        """The name of a view that was written to since it was made, or since the last answer."""
        if self.aliases_shard:
            return None
        now = [view._version for view in self.views]
        if now == self._versions:
            return None
        found = next(i for i, pair in enumerate(zip(now, self._versions, strict=True)) if pair[0] != pair[1])
        self._versions = now
        return self._slots[found].name


def view_into(flat: Tensor, slot: Slot) -> Tensor:
    """A tensor in the slot's shape over the buffer's memory, which autograd does not take for a view of it."""
    made = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), flat.storage_offset() + slot.start, slot.shape, slot.stride)
