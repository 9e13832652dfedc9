"""A rank's shard of a flat parameter's gradient, as the optimizer sees it, and what has not been averaged yet.

Between backwards `.grad` is the average, sharded as the parameters are. After a backward that did not synchronise it is
this rank's own sum over all elements, so that `zero_grad` does to it what it does everywhere; the average of earlier
backwards waits aside.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._layout.flat_handle import FlatParamHandle
from impl.distributed.fsdp._layout.flat_slots import FlatLayout
from impl.distributed.fsdp._layout.unreduced_state import UnreducedState
from impl.distributed.fsdp._params.autograd import apply_gradient_hooks
from impl.distributed.fsdp._params.param_group import NewBuffer
from impl.kernels import copy_to_host_async

# Where torch.distributed.optim._apply_optimizer_in_backward leaves a parameter's optimizers.
_OPTIMIZERS = "_in_backward_optimizers"


@dataclass(frozen=True)
class _ShownUnreduced:
    """`.grad` of one parameter after a backward that did not synchronise."""

    index: int  # of the parameter
    view: Tensor
    version: int  # of `.grad` when it was shown


class GradientShard:
    """`.grad` of one flat parameter, of `flat_param` or of the user's own parameters."""

    def __init__(self, handle: FlatParamHandle, keeps_low_precision: bool) -> None:
        self._handle = handle
        self._keeps_low_precision = keeps_low_precision
        self._averaged: Tensor | None = None  # [shard_numel], of earlier backwards, taken aside
        self._reduced: Tensor | None = None  # [shard_numel], of this backward, not shown yet
        self._shown: Tensor | None = (
            None  # [shard_numel], what the user's own parameters' `.grad` are made of
        )
        self._shown_places: list[tuple[int, torch.Size] | None] = []  # address and shape of each
        self._unreduced: Tensor | None = None  # [padded_numel], of backwards that did not synchronise
        self._unreduced_views: list[Tensor] = []
        self._shown_unreduced: list[_ShownUnreduced] = []
        self._state = UnreducedState()

    def refuse_optimizers(self) -> None:
        """
        Raises:
            RuntimeError: torch's helper is to step a flat parameter, of which it cannot know when it has its gradient.
        """
        if not self._handle.use_orig_params and hasattr(self._handle.flat_param, _OPTIMIZERS):
            raise RuntimeError("FSDP optimizer in backward only supported with use_orig_params=True!")

    def are_there(self) -> bool:
        """Whether any rank has some to step by. If this rank has no element of it, it sees none cleared."""
        return self._shown is not None and not (any(self._shown_places) and self._is_cleared())

    def still_wait(self) -> bool:
        """Whether some are left of backwards that did not synchronise, where the one that does has not come by."""
        if self._unreduced is not None:
            self.begin_backward()
        return self._unreduced is not None and not self._state.is_on_the_way

    def waiting(self) -> list[tuple[str, nn.Parameter]]:
        if self._unreduced is None or self._state.is_on_the_way:
            return []
        handle = self._handle
        names = [slot.name for slot in handle.layout.slots]
        stepped = handle.stepped if handle.use_orig_params else [handle.flat_param] * len(names)
        return [pair for pair in zip(names, stepped, strict=True) if pair[1].grad is not None]

    def owes_zeros(self) -> bool:
        """What is not used counts as zero in any case."""
        return False

    def forget_if_cleared(self) -> None:
        """Let go of memory that `.grad` was made of until a user set it to None."""
        if self._shown is not None and self._is_cleared():
            self._shown = None
            self._shown_places = []

    def begin_backward(self) -> None:
        """Take aside what `.grad` holds, so that this backward is added to it."""
        if self._unreduced is None:
            if self._averaged is None and self._reduced is None:
                self._averaged = self._taken_from_grad()
        elif self._is_cleared():
            self._averaged = None
            self._forget_unreduced()
        elif not self._state.is_on_the_way:
            if self._state.is_partial and self._unreduced.any():
                names = [slot.name for slot in self._handle.layout.slots]
                raise self._state.partial_gradients(names, "set them to None by zero_grad()")
            self._follow_unreduced()

    def abandon_backward(self) -> None:
        """`.grad` stays as it is, and counts; so do backwards that did not synchronise."""
        self._reduced = None
        if self._state.abandon_backward():
            self._forget_unreduced()
        if self._unreduced is None:
            self._averaged = None

    def accumulate_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        handle, grads = self._handle, self._hooked(grads)
        self._state.note_added(to_earlier=self._unreduced is not None)
        if self._unreduced is None:
            dtype = next(grad.dtype for grad in grads if grad is not None)
            self._unreduced = torch.empty(handle.layout.padded_numel, dtype=dtype, device=handle.device)
            self._unreduced_views = handle.views_of(self._unreduced)
            _copy_in(handle.layout, grads, self._unreduced_views, self._unreduced)
        else:
            self._shown_unreduced = []  # until the end of this backward
            _add(self._unreduced_views, grads)

    def reduce_input(
        self, grads: Sequence[Tensor | None], dtype: torch.dtype | None, new_buffer: NewBuffer
    ) -> Tensor:
        """All that has not been averaged, with `grads` added, [padded_numel]."""
        unsharded, handle, grads = self._unreduced, self._handle, self._hooked(grads)
        dtype = dtype or handle.reduce_dtype
        if unsharded is not None and not self._state.is_on_the_way:
            self._state.is_on_the_way = True
            total = unsharded.clone()  # should this backward raise, the other ones count
            _add(handle.views_of(total), grads)
            return total.to(dtype)
        buffer, views = new_buffer(handle.layout.padded_numel, dtype, handle.views_of)
        _copy_in(handle.layout, grads, views, buffer)
        return buffer

    def _hooked(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return what hooks of a flat parameter make of this rank's gradients, which they see as one."""
        handle = self._handle
        present = [grad for grad in grads if grad is not None]
        if handle.use_orig_params or not handle.flat_param._backward_hooks or not present:
            return grads
        flat = present[0].new_empty(handle.layout.padded_numel)
        _copy_in(handle.layout, grads, handle.views_of(flat), flat)
        hooked = apply_gradient_hooks(handle.flat_param, flat[: handle.layout.numel], "a flat parameter")
        return handle.views_of(hooked.contiguous())

    def _apply_hooks(self, reduced: Tensor) -> None:
        """Write back what hooks of the user's own parameters make of their parts of an average [shard_numel]."""
        handle = self._handle
        if not handle.use_orig_params:
            return
        for slot, parameter, part in zip(
            handle.layout.slots, handle.parameters, handle.pieces_of(reduced), strict=True
        ):
            if part is not None and parameter._backward_hooks:
                part.copy_(apply_gradient_hooks(parameter, part, slot.name))

    def add(self, reduced: Tensor) -> None:
        """Add an average [shard_numel] of any dtype to those of this backward.

        Sync: none the first time, on the CPU too: before anything is shown the host waits, once for all units.
        """
        handle = self._handle
        keeps = self._keeps_low_precision and not handle.is_sharded
        mine = reduced if keeps else reduced.to(handle.dtype)
        if handle.offloads:
            mine = copy_to_host_async(mine) if self._reduced is None else mine.to("cpu")
        if self._reduced is None:
            self._reduced = mine if mine is not reduced or handle.is_sharded else mine.clone()
        else:
            self._reduced = self._reduced.to(mine.dtype).add_(mine)

    def end_backward(self, synced: bool) -> None:
        """Show what this backward left."""
        was_reduced = self._state.end_backward()
        if not synced:
            if self._unreduced is not None:
                self._show_unreduced()
            return
        if was_reduced:
            self._forget_unreduced()
        averaged, self._averaged = self._averaged, None
        reduced, self._reduced = self._reduced, None
        if reduced is not None:
            self._apply_hooks(reduced)
        if averaged is None:
            averaged = reduced
        elif reduced is not None:
            averaged = averaged.to(reduced.dtype).add_(reduced)
        if averaged is None:
            return
        if self._keeps_low_precision and self._handle.is_sharded:
            averaged = averaged.to(self._handle.compute_dtype)
        self.show(averaged)
        if reduced is not None:
            self._call_hooks()

    def _call_hooks(self) -> None:
        """What a user has asked to be called, or stepped, after accumulation: autograd sees none of these parameters.

        After a backward that synchronised alone: a step from a rank's own sum would part the ranks.
        """
        for parameter in self._handle.stepped:
            if parameter.grad is None:
                continue
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)
            optimizers = getattr(parameter, _OPTIMIZERS, ())
            for optimizer in optimizers:
                optimizer.step()
            if optimizers:
                parameter.grad = None

    def show(self, shard: Tensor) -> None:
        """Make [shard_numel] the `.grad` of what the optimizer steps."""
        handle = self._handle
        if not handle.use_orig_params:
            _set_grad(handle.flat_param, shard)
            return
        self._shown = shard
        parts = handle.pieces_of(shard)
        self._shown_places = [None if part is None else (part.data_ptr(), part.shape) for part in parts]
        for parameter, part in zip(handle.parameters, parts, strict=True):
            if part is None or not parameter.requires_grad:
                parameter.grad = None
            else:
                _set_grad(parameter, part)

    @contextmanager
    def on_flat_param(self) -> Generator[None]:
        """Inside, what `.grad` holds is `flat_param`'s, whatever it is moved or cast to there."""
        handle = self._handle
        if self._unreduced is not None:
            self.begin_backward()
        waiting = self._unreduced
        shard = self.current() if waiting is None else waiting
        if handle.use_orig_params:
            for parameter in handle.parameters:
                parameter.grad = None
        if shard is not None:
            _set_grad(handle.flat_param, shard)
        try:
            yield
        finally:
            moved, handle.flat_param.grad = handle.flat_param.grad, None
            if moved is not None:
                self._show_moved(moved, is_unreduced=waiting is not None)

    def _show_moved(self, moved: Tensor, is_unreduced: bool) -> None:
        if not is_unreduced:
            self.show(moved)
            return
        self._unreduced = moved = moved.detach()
        self._unreduced_views = self._handle.views_of(moved)
        if self._averaged is not None:
            self._averaged = self._averaged.to(self._handle.flat_param)
        self._show_unreduced()

    def current(self) -> Tensor | None:
        """What `.grad` holds, [shard_numel], whoever put it there; None if there is none."""
        if self._unreduced is not None:
            return None
        return self._taken_from_grad()

    def _is_cleared(self) -> bool:
        return all(parameter.grad is None for parameter in self._handle.stepped)

    def _taken_from_grad(self) -> Tensor | None:
        handle = self._handle
        if not handle.use_orig_params:
            return handle.flat_param.grad
        present = [parameter.grad for parameter in handle.parameters]
        if all(grad is None for grad in present):
            return None
        if self._shown is not None and self._is_as_shown(present):
            return self._shown
        return self._copied_in(present)

    def _is_as_shown(self, present: Sequence[Tensor | None]) -> bool:
        for grad, place in zip(present, self._shown_places, strict=False):
            if place is not None and (grad is None or (grad.data_ptr(), grad.shape) != place):
                return False
        return len(self._shown_places) == len(present)

    def _copied_in(self, present: Sequence[Tensor | None]) -> Tensor:
        """A user replaced some gradients or set some to None: what there is now, zeros elsewhere."""
        handle = self._handle
        dtype = next(grad.dtype for grad in present if grad is not None)
        shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.flat_param.device)
        for part, grad in zip(handle.pieces_of(shard), present, strict=True):
            if part is not None and grad is not None:
                part.copy_(grad)
        return shard

    def _show_unreduced(self) -> None:
        assert self._unreduced is not None
        handle = self._handle
        views = self._unreduced_views if handle.use_orig_params else [self._unreduced]
        self._shown_unreduced = []
        for index, (parameter, view) in enumerate(zip(handle.stepped, views, strict=True)):
            if parameter.requires_grad:
                _set_grad(parameter, view.detach())
                assert parameter.grad is not None
                self._shown_unreduced.append(_ShownUnreduced(index, view, parameter.grad._version))

    def _follow_unreduced(self) -> None:
        """Do to what is aside what a user did to the `.grad` shown of it: cleared, set to zero, or replaced."""
        handle = self._handle
        for shown in self._shown_unreduced:
            grad = handle.stepped[shown.index].grad
            is_there = grad is not None and grad.data_ptr() == shown.view.data_ptr()
            if grad is not None and is_there and grad._version == shown.version:
                continue
            if grad is None or not grad.any():
                shown.view.zero_()
                self._clear_averaged(shown.index)
            elif not is_there:
                shown.view.copy_(grad)

    def _clear_averaged(self, index: int) -> None:
        if self._averaged is None:
            return
        part = (
            self._handle.pieces_of(self._averaged)[index] if self._handle.use_orig_params else self._averaged
        )
        if part is not None:
            part.zero_()

    def _forget_unreduced(self) -> None:
        self._unreduced = None
        self._unreduced_views = []
        self._shown_unreduced = []
        self._state.forget()


def _add(views: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    pairs = [(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not None]
    if pairs:
        torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])


def _copy_in(layout: FlatLayout, grads: Sequence[Tensor | None], views: list[Tensor], buffer: Tensor) -> None:
    """Copy gradients into a buffer [padded_numel] that `views` lie over, casting; zeros where there is none."""
    present = [grad for grad in grads if grad is not None]
    if len(present) == len(views):
        torch._foreach_copy_(views, present)
    else:
        targets = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
        torch._foreach_copy_(targets, present)
        torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])
    for start, stop in layout.gaps:
        buffer[start:stop].zero_()


def _set_grad(parameter: Tensor, grad: Tensor) -> None:
    """Set `.grad` also where its shape, dtype or device are not the parameter's, which assignment refuses."""
    if grad.shape == parameter.shape and grad.dtype is parameter.dtype and grad.device == parameter.device:
        parameter.grad = grad
        return
    parameter.grad = torch.empty_like(parameter)
    parameter.grad.data = grad
