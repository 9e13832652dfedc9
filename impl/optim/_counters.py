"""Step counters that are advanced together.

torch keeps a 0-dim tensor for each parameter and adds 1 to each, which costs more than the guards of a whole plan.
Here they are moved into one buffer and advanced by one addition. Each stays the tensor object that it was, in
`state[parameter]["step"]` and wherever else it is held; only its storage is another one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impl.kernels import Addresses

_pointer = Tensor.data_ptr


class Counters:
    """The step counters of one bucket."""

    def __init__(self, steps: list[Tensor]) -> None:
        self.steps = steps
        self.flat: Tensor | None = None  # all of them, where they lie one behind the other
        self._addresses: Addresses | None = None  # of those in one buffer
        self._one: Tensor | int = 1  # on the CPU a tensor: of a number its operator makes one in each step
        self._keep(in_a_row(steps))

    def join(self) -> bool:
        """Move them into one buffer, unless they are there or cannot be; whether they were moved."""
        if self.flat is not None:
            return False
        self._keep(moved_together(self.steps))
        return self.flat is not None

    def part_if_moved(self) -> None:
        """Advance them one by one, until they are joined again, if one is no longer in the buffer."""
        if self.have_moved():
            self.flat = self._addresses = None

    def have_moved(self) -> bool:
        """Whether somebody gave one of them other memory since this was last asked, by `.data` or `set_`."""
        return self._addresses is not None and self._addresses.have_moved()

    def advance(self, taken: Tensor | None = None) -> None:
        """Add 1; or `taken`, f32 and 0-dim on their device, which is 0 if the step that follows is skipped."""
        if self.flat is not None:
            self.flat.add_(self._one if taken is None else taken)
        elif self.steps:
            torch._foreach_add_(self.steps, 1 if taken is None else [taken] * len(self.steps))

    def take_back(self, found_inf: Tensor) -> None:
        """Undo `advance` where `found_inf` is 1."""
        if self.flat is not None:
            self.flat.sub_(found_inf)
        elif self.steps:
            torch._foreach_sub_(self.steps, [found_inf] * len(self.steps))

    def _keep(self, flat: Tensor | None) -> None:
        if flat is not None:
            self.flat, self._addresses = flat, Addresses(self.steps)
            self._one = flat.new_ones(()) if flat.is_cpu else 1


def in_a_row(steps: list[Tensor]) -> Tensor | None:
    """The counters as one tensor, if they lie so already; None if not."""
    if not steps or not _are_alike(steps):
        return None
    first, size = steps[0], steps[0].element_size()
    begin = first.data_ptr()
    if list(map(_pointer, steps)) != list(range(begin, begin + size * len(steps), size)):
        return None
    return first.detach().as_strided((len(steps),), (1,))


def moved_together(steps: list[Tensor]) -> Tensor | None:
    """Give the counters one buffer and return it; None, with nothing moved, if they cannot share one.

    Two that share memory stay as they are, as do those that other processes share: apart, each would count for itself.
    """
    if not steps or not _are_alike(steps) or len(set(map(_pointer, steps))) < len(steps):
        return None
    if any(step.is_cpu and step.is_shared() for step in steps):
        return None
    flat = torch.stack(steps)
    for step, place in zip(steps, flat.unbind(), strict=True):
        step.data = place
    return flat


def _are_alike(steps: list[Tensor]) -> bool:
    # A state that was loaded may hold numbers, which torch's functions refuse with a cure.
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
