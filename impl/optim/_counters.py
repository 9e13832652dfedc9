"""Step counters that are advanced together.

torch keeps a 0-dim tensor for each parameter and adds 1 to each, which costs more than checking the guards of all
lists. Here the counters are moved into one buffer and advanced by one addition. They stay the same tensor objects, in
`state[parameter]["step"]` and elsewhere. Only their storage changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impl.kernels import Addresses, foreach_slices

_pointer = Tensor.data_ptr


class Counters:
    """The step counters of one bucket."""

    def __init__(self, steps: list[Tensor]) -> None:
        self.steps = steps
        self.flat: Tensor | None = None  # the buffer with all counters
        self._addresses: Addresses | None = None  # addresses within the buffer
        # A tensor on the CPU, because torch's operator would convert a number to a tensor in each step.
        self._one: Tensor | int = 1
        self._keep(contiguous_view(steps))

    def pack(self) -> bool:
        """Move the counters into one buffer if they can be. Return whether they were moved."""
        if self.flat is not None:
            return False
        self._keep(moved_into_one_buffer(self.steps))
        return self.flat is not None

    def unpack_if_moved(self) -> None:
        """Stop using the buffer, until the next `pack`, if a counter is no longer in it."""
        if self.refresh_addresses():
            self.flat = self._addresses = None

    def refresh_addresses(self) -> bool:
        """Look up the addresses. Return whether one has changed since the last call, by `.data` or `set_`."""
        return self._addresses is not None and self._addresses.refresh()

    def advance(self, taken: Tensor | None = None) -> None:
        """Add 1, or `taken`: f32, 0-dim, on the counters' device, 0 if the step that follows is skipped."""
        if self.flat is not None:
            self.flat.add_(self._one if taken is None else taken)
            return
        for steps in self._lists():
            torch._foreach_add_(steps, 1 if taken is None else [taken] * len(steps))

    def undo_advance(self, found_inf: Tensor) -> None:
        """Undo `advance` if `found_inf` is 1."""
        if self.flat is not None:
            self.flat.sub_(found_inf)
            return
        for steps in self._lists():
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _lists(self) -> list[list[Tensor]]:
        """Return the counters in lists for torch's operators. A counter of two parameters counts twice."""
        return [self.steps[batch] for batch in foreach_slices(self.steps)]

    def _keep(self, flat: Tensor | None) -> None:
        if flat is not None:
            self.flat, self._addresses = flat, Addresses(self.steps)
            self._one = flat.new_ones(()) if flat.is_cpu else 1


def contiguous_view(steps: list[Tensor]) -> Tensor | None:
    """Return a view of all counters if they are contiguous in memory, else None."""
    if not steps or not _are_alike(steps):
        return None
    first, size = steps[0], steps[0].element_size()
    begin = first.data_ptr()
    if list(map(_pointer, steps)) != list(range(begin, begin + size * len(steps), size)):
        return None
    return first.detach().as_strided((len(steps),), (1,))


def moved_into_one_buffer(steps: list[Tensor]) -> Tensor | None:
    """Move the counters into one buffer and return it, or return None and move nothing if they cannot share one.

    Counters that share memory, with each other or with other processes, cannot: each copy would count on its own.
    """
    if not steps or not _are_alike(steps) or len(set(map(_pointer, steps))) < len(steps):
        return None
    if any(step.is_cpu and step.is_shared() for step in steps):
        return None
    flat = torch.stack(steps)
    for step, element in zip(steps, flat.unbind(), strict=True):
        step.data = element
    return flat


def _are_alike(steps: list[Tensor]) -> bool:
    # A loaded state may hold numbers. torch's functions raise for these with a helpful text.
    if torch.is_inference_mode_enabled() or any(type(step) is not Tensor for step in steps):
        return False
    dtype, device = steps[0].dtype, steps[0].device
    return all(
        step.dim() == 0
        and step.dtype is dtype
        and step.device == device
        and not step.requires_grad
        and not step.is_inference()
        for step in steps
    )
