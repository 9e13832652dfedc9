"""A flat parameter's elements: storage that comes and goes, and the leaves over it, which forward computes with."""

from __future__ import annotations

import torch
from torch import Tensor

from impl.distributed.fsdp._flat_layout import FlatLayout, Slot


class Whole:
    """All elements in one dtype; `flat` [padded_numel] comes and goes, `leaves` lie over it for good."""

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, device: torch.device, over: Tensor | None = None
    ) -> None:
        self.is_lasting = over is not None
        self.flat = torch.empty(layout.padded_numel, dtype=dtype, device=device) if over is None else over
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.leaves = [laid_over(self.flat, slot) for slot in layout.slots]
        # Gathering writes behind autograd's back, so whatever moves these was a change to a parameter.
        self._versions = [leaf._version for leaf in self.leaves]
        self._filled_from: list[int] = []  # versions of the shard
        self.trainable: list[Tensor] = []
        self.has_frozen = True
        self._follows: list[bool] = []
        self.is_live = True
        self.is_given_up = False  # for another, since the shard was moved or cast
        self.free()

    @property
    def memory(self) -> int:
        """The address of its storage."""
        return self._storage._cdata

    def follow(self, wants_grad: list[bool]) -> None:
        """Have each leaf, or all of them, require a gradient or not."""
        if wants_grad == self._follows:
            return
        self._follows = wants_grad
        for index, leaf in enumerate(self.leaves):
            # The method is refused inside of functorch's transforms.
            leaf.requires_grad = wants_grad[index if len(wants_grad) > 1 else 0]
        self.trainable = [leaf for leaf in self.leaves if leaf.requires_grad]
        self.has_frozen = len(self.trainable) < len(self.leaves)

    def lie_over(self, shard: Tensor, layout: FlatLayout) -> None:
        """Of a lasting one: the shard has other memory now."""
        self.flat = shard
        self._storage = shard.untyped_storage()
        with torch.inference_mode(False), torch.no_grad():
            for leaf, slot in zip(self.leaves, layout.slots, strict=True):
                leaf.data = laid_over(shard, slot)

    def allocate(self) -> None:
        if not self.is_live:
            self._storage.resize_(self._nbytes)
            self.is_live = True

    def free(self) -> None:
        if self.is_live and not self.is_lasting:
            self._storage.resize_(0)
            self.is_live = False

    def is_filled_from(self, versions: list[int]) -> bool:
        return self._filled_from == versions

    def fill_from(self, versions: list[int]) -> list[int]:
        """Its elements are those of a shard with these versions: to graphs made of others they are changed in place.

        The numbers of the leaves that are.
        """
        before, self._filled_from = self._filled_from, versions
        if before == versions:
            return []
        moved = [*range(len(self.leaves))]
        if before[:1] == versions[:1]:  # by names of parameters alone
            moved = [index for index in moved if before[1 + index] != versions[1 + index]]
        torch.autograd.graph.increment_version([self.leaves[index] for index in moved])
        for index in moved:
            self._versions[index] += 1
        return moved

    def take_gradients(self) -> list[Tensor | None]:
        """Those of the leaves, which lose them."""
        grads = [leaf.grad for leaf in self.leaves]
        for leaf in self.trainable:
            leaf.grad = None
        if any(grad is not None and grad.requires_grad for grad in grads):
            raise RuntimeError("FSDP does not support gradients of gradients")
        return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]

    def changed(self) -> int | None:
        """The number of a leaf that was written to since it was made, or since the last answer."""
        if self.is_lasting:
            return None
        now = [leaf._version for leaf in self.leaves]
        if now == self._versions:
            return None
        found = next(i for i, pair in enumerate(zip(now, self._versions, strict=True)) if pair[0] != pair[1])
        self._versions = now
        return found


def laid_over(flat: Tensor, slot: Slot) -> Tensor:
    """A tensor in the slot's shape over the buffer's memory, which autograd does not take for a view of it."""
    made = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), flat.storage_offset() + slot.start, slot.shape, slot.stride)
