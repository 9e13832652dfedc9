"""The sum of a flat parameter's gradients that are not averaged yet, which `.grad` shows and the user may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from impl.distributed.fsdp._layout.flat_handle import FlatParamHandle
from impl.kernels import keep_for_current_stream


@dataclass(frozen=True)
class _Published:
    """`.grad` of one parameter."""

    index: int  # index of the parameter
    view: Tensor
    version: int  # version of `.grad` when it was published


class UnreducedGrads:
    """Sum of the gradients of backwards that did not synchronise.

    Args:
        total: the sum, [padded_numel].
    """

    def __init__(self, handle: FlatParamHandle, total: Tensor) -> None:
        self.total = total
        self.views = handle.views_of(total)  # gradients of the unsharded parameters
        self.is_incomplete = False  # includes some gradients of a failed backward
        self.was_published = False  # gradients may have been added since
        self._handle = handle
        self._published: list[_Published] = []

    @property
    def is_published(self) -> bool:
        """Whether `.grad` shows the sum as it is, apart from the user's changes."""
        return bool(self._published)

    @property
    def grad_views(self) -> list[Tensor]:
        """Views of the sum for `.grad` of the stepped parameters."""
        return self.views if self._handle.use_orig_params else [self.total]

    def publish(self) -> None:
        """Publish the sum in `.grad`."""
        self._published, self.was_published = [], True
        for index, (parameter, view) in enumerate(zip(self._handle.stepped, self.grad_views, strict=True)):
            if parameter.requires_grad:
                set_grad(parameter, view.detach())
                assert parameter.grad is not None
                self._published.append(_Published(index, view, parameter.grad._version))

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of a backward. Call `publish` to show the new sum."""
        self._published = []
        add_grads(self.views, grads)

    def add_average(self, average: Tensor) -> None:
        """Add an average of earlier backwards, if the gradients are not sharded."""
        if self.total.dtype is not average.dtype:
            keep_for_current_stream([self.total])
        self.total = self.total.to(average.dtype).add_(average.to(self.total.device))
        self.views = self._handle.views_of(self.total)

    def new_grads(self) -> list[int]:
        """Return the parameters whose `.grad` was cleared, and then set by a loss that reads them directly.

        Such a gradient has the shape of the parameter's shard. Without sharding it looks like a gradient that the user
        has assigned, and counts as one.
        """
        if not self._handle.is_sharded:
            return []
        others = [
            (index, param, param.grad)
            for index, (param, view) in enumerate(zip(self._handle.stepped, self.grad_views, strict=True))
            if param.grad is not None and not _is_memory_of(param.grad, view)
        ]
        if any(grad.shape != param.shape for _, param, grad in others):
            return []  # the user has assigned to `.grad.data`
        return [index for index, _, _ in others]

    def is_in_grad(self) -> bool:
        """Return whether a parameter still has its part of the sum in `.grad`.

        Without sharding, a `.grad` that was assigned may belong to a new sum, so it does not count.
        """
        if self._handle.is_sharded:
            return not is_cleared(self._handle, self.new_grads())
        pairs = zip(self._handle.stepped, self.grad_views, strict=True)
        return any(param.grad is not None and _is_memory_of(param.grad, view) for param, view in pairs)

    def follow_user(self, new: Sequence[int]) -> list[tuple[int, Tensor | None]]:
        """Apply the user's changes of `.grad` to the sum: cleared, zeroed, replaced, or `new`.

        Return the parameters whose averages of earlier backwards change too, with the new average or None for zeros.
        """
        averages: list[tuple[int, Tensor | None]] = []
        for published in self._published:
            grad = self._handle.stepped[published.index].grad
            if grad is not None and published.index in new:
                published.view.zero_()
                averages.append((published.index, grad))
                continue
            is_there = grad is not None and grad.data_ptr() == published.view.data_ptr()
            if grad is not None and is_there and grad._version == published.version:
                continue
            if grad is None or not grad.any():
                published.view.zero_()
                averages.append((published.index, None))
            elif not is_there:
                keep_for_current_stream([grad])
                published.view.copy_(grad)
        return averages


def is_cleared(handle: FlatParamHandle, new: Sequence[int] = ()) -> bool:
    """Return whether no stepped parameter has a `.grad`, apart from the parameters at `new`."""
    return all(parameter.grad is None or index in new for index, parameter in enumerate(handle.stepped))


def add_grads(views: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    pairs = [(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not None]
    if pairs:
        torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])


def set_grad(parameter: Tensor, grad: Tensor) -> None:
    """Set `.grad` even if its shape, dtype or device differ from the parameter's, which an assignment refuses."""
    if grad.shape == parameter.shape and grad.dtype is parameter.dtype and grad.device == parameter.device:
        parameter.grad = grad
        return
    parameter.grad = torch.empty_like(parameter)
    parameter.grad.data = grad


def _is_memory_of(grad: Tensor, view: Tensor) -> bool:
    return grad.shape == view.shape and (not view.numel() or grad.data_ptr() == view.data_ptr())
