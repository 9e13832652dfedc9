"""A rank's shard of a flat parameter's gradient, as the optimizer sees it, and gradients that are not averaged yet.

Between backwards `.grad` is the average, sharded like the parameters. After a backward without synchronisation `.grad`
is this rank's own sum over all elements, so that `zero_grad` works as usual. The average of earlier backwards is kept
aside. Without sharding it counts in the sum, because the average of equal gradients is that gradient.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn

from impl.distributed.fsdp._layout.flat_buffer import copy_grads
from impl.distributed.fsdp._layout.flat_grad_hooks import (
    call_accumulation_hooks,
    has_hooks,
    run_hooks_after_reduction,
    run_hooks_before_reduction,
)
from impl.distributed.fsdp._layout.flat_handle import FlatParamHandle
from impl.distributed.fsdp._layout.reduced_grads import ReducedGrads
from impl.distributed.fsdp._layout.unreduced_grads import UnreducedGrads, add_grads, is_cleared, set_grad
from impl.distributed.fsdp._params.managed import IN_BACKWARD_OPTIMIZERS
from impl.distributed.fsdp._params.param_group import BackwardJournal, NewBuffer, incomplete_gradients
from impl.kernels import copy_to_host_async, keep_for_current_stream
from impl.optim._held_gradients import HeldGradient, HeldGradients

# Keys of held gradients.
_AVERAGED, _UNREDUCED = "averaged", "unreduced"


class GradientShard:
    """`.grad` of one flat parameter: of `flat_param`, or of the user's own parameters.

    Args:
        keeps_low_precision: as `MixedPrecision.keep_low_precision_grads`. Like in torch, `.grad` of a sharded parameter
            is the average in the parameter's dtype, cast to `param_dtype`. Unsharded, it is never cast.
    """

    def __init__(self, handle: FlatParamHandle, keeps_low_precision: bool) -> None:
        self.journal = BackwardJournal()
        self._handle = handle
        self._casts_average = keeps_low_precision and handle.is_sharded
        self._keeps_reduced = keeps_low_precision and not handle.is_sharded
        self._averaged: Tensor | None = None  # [shard_numel], averages beside an unreduced `.grad`
        self._reduced: Tensor | None = None  # [shard_numel], of this backward, not published yet
        # [shard_numel], memory of the `.grad` of the user's own parameters.
        self._published: Tensor | None = None
        self._grad_places: list[tuple[int, torch.Size] | None] = []  # address and shape of each
        # A backward has published gradients, which the user may have cleared since.
        self._was_published = False
        self._unreduced: UnreducedGrads | None = None
        # `.grad` of an unreduced sum that the running backward has reduced.
        self._reduced_grads: ReducedGrads | None = None
        # [padded_numel], unreduced sum before the running microbatch, until it is reduced.
        self._before_microbatch: Tensor | None = None
        self._earlier_keys: list[Hashable] = []  # key of that sum, once it was reduced

    def check_optimizers(self) -> None:
        """Check that torch's helper for optimizers in backward does not step the flat parameter.

        Raises:
            RuntimeError: it would, although it cannot know when the flat parameter has its gradient.
        """
        if not self._handle.use_orig_params and hasattr(self._handle.flat_param, IN_BACKWARD_OPTIMIZERS):
            raise RuntimeError("FSDP optimizer in backward only supported with use_orig_params=True!")

    def exist_on_any_rank(self) -> bool:
        """Return whether any rank has gradients to step with, the same on every rank.

        A rank without trained elements cannot see a clear. So if there is such a rank, clears count on no rank.
        """
        handle = self._handle
        if not handle.use_orig_params:
            return handle.flat_param.grad is not None
        if self._published is not None and not is_cleared(self._handle):
            return True
        trained = compress(handle.layout.slots, [parameter.requires_grad for parameter in handle.parameters])
        return self._was_published and not handle.layout.is_on_every_rank(trained)

    def update_unreduced(self) -> bool:
        """Apply the user's changes to gradients of earlier backwards that are still unreduced.

        Return whether there are any.
        """
        if self._unreduced is not None:
            self.begin_backward()
        return self._unreduced is not None or self._before_microbatch is not None

    def unsynchronized(self) -> list[tuple[str, nn.Parameter]]:
        unreduced = self._unreduced
        if self._reduced_grads is None and (unreduced is None or not unreduced.is_in_grad()):
            return []
        handle = self._handle
        names = [slot.name for slot in handle.layout.slots]
        stepped = handle.stepped if handle.use_orig_params else [handle.flat_param] * len(names)
        return [pair for pair in zip(names, stepped, strict=True) if pair[1].grad is not None]

    def must_reduce_zeros(self) -> bool:
        """Return False, because unused parameters count as zeros in any case."""
        return False

    def forget_if_cleared(self) -> None:
        """Free the memory of gradients that the user has set to None."""
        if self._published is not None and is_cleared(self._handle):
            self._published = None
            self._grad_places = []

    def begin_backward(self) -> None:
        """Apply the user's changes of a published `.grad` that is unreduced.

        Any other `.grad` stays, and autograd adds to it the gradients of losses that read parameters directly.
        """
        unreduced = self._unreduced
        if unreduced is None:
            return
        new = unreduced.new_grads()
        if is_cleared(self._handle, new):
            self._averaged = self._unreduced = None
        else:
            if unreduced.is_incomplete and unreduced.total.any():
                names = [slot.name for slot in self._handle.layout.slots]
                raise incomplete_gradients(names, "set them to None by zero_grad()")
            unreduced.is_incomplete = False  # the user has zeroed them
            for index, grad in unreduced.follow_user(new):
                self._set_averaged(index, grad)

    def accumulate_unreduced(self, grads: Sequence[Tensor | None]) -> None:
        handle = self._handle
        grads = run_hooks_before_reduction(handle, grads)
        unreduced = self._unreduced
        if unreduced is None:
            self.journal.record(self._forget_unreduced)
            dtype = next(grad.dtype for grad in grads if grad is not None)
            total = torch.empty(handle.layout.padded_numel, dtype=dtype, device=handle.device)
            self._unreduced = unreduced = UnreducedGrads(handle, total)
            copy_grads(handle.layout, grads, unreduced.views, total)
        else:
            self.journal.record(self._mark_incomplete)
            unreduced.add(grads)

    def reduce_input(
        self, grads: Sequence[Tensor | None], dtype: torch.dtype | None, new_buffer: NewBuffer
    ) -> Tensor:
        """Return all gradients that are not averaged, with `grads` added, [padded_numel]."""
        handle = self._handle
        grads = run_hooks_before_reduction(handle, grads)
        dtype = dtype or handle.reduce_dtype
        total = self._take_unreduced()
        if total is not None:
            add_grads(handle.views_of(total), grads)
            return total.to(dtype)
        buffer, views = new_buffer(handle.layout.padded_numel, dtype, handle.views_of)
        copy_grads(handle.layout, grads, views, buffer)
        return buffer

    def begin_microbatch(self) -> HeldGradients:
        held = self._take()
        self._before_microbatch = held[_UNREDUCED].tensor if _UNREDUCED in held else None
        self._earlier_keys = []
        return held

    def end_microbatch(self) -> tuple[HeldGradients, list[Hashable]]:
        self._before_microbatch = None
        return self._take(), self._earlier_keys

    def put(self, tensors: Mapping[Hashable, Tensor]) -> None:
        self._before_microbatch = None
        self._drop()
        averaged, total = tensors.get(_AVERAGED), tensors.get(_UNREDUCED)
        if total is not None:
            self._averaged = averaged
            self._unreduced = UnreducedGrads(self._handle, total)
            self._unreduced.publish()
        elif averaged is not None:
            self.publish(averaged)

    def _take(self) -> HeldGradients:
        handle = self._handle
        if self._unreduced is not None:
            self.begin_backward()
        unreduced = self._unreduced
        averaged = self._average_in_grad() if unreduced is None else self._averaged
        self._drop()
        held: HeldGradients = {}
        if averaged is not None:
            pieces = handle.pieces_of(averaged) if handle.use_orig_params else [averaged]
            pairs = zip(handle.stepped, pieces, strict=True)
            parts = [(param, piece) for param, piece in pairs if piece is not None]
            held[_AVERAGED] = HeldGradient(averaged, parts)
        if unreduced is not None:
            parts = list(zip(handle.stepped, unreduced.grad_views, strict=True))
            held[_UNREDUCED] = HeldGradient(unreduced.total, parts)
        return held

    def _drop(self) -> None:
        self._unreduced = self._averaged = self._published = None
        self._grad_places = []
        self._was_published = False
        for parameter in self._handle.stepped:
            parameter.grad = None

    def _take_unreduced(self) -> Tensor | None:
        """Return a copy of the sum of all unreduced gradients, which are reduced now, or None if there are none."""
        earlier, unreduced = self._before_microbatch, self._unreduced
        if earlier is None and unreduced is None:
            return None
        self.journal.record(partial(self._restore_unreduced, unreduced, earlier))
        self._before_microbatch = self._unreduced = None
        keep_for_current_stream([earlier, None if unreduced is None else unreduced.total])
        if earlier is not None:
            self._earlier_keys = [_UNREDUCED]
        if unreduced is None:
            assert earlier is not None
            return earlier.clone()
        if unreduced.was_published:
            self._reduced_grads = ReducedGrads(self._handle.stepped)
        return unreduced.total.clone() if earlier is None else earlier + unreduced.total

    def add(self, reduced: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Add an average [shard_numel] of any dtype to the averages of this backward.

        Sync: none the first time, on the CPU too. The host waits once for all units before gradients are published.
        """
        handle = self._handle
        average = reduced if self._keeps_reduced else reduced.to(handle.dtype)
        if handle.offloads:
            average = copy_to_host_async(average) if self._reduced is None else average.to("cpu")
        if self._reduced is None:
            self.journal.record(self._forget_reduced)
            self._reduced = average if average is not reduced or handle.is_sharded else average.clone()
            return self._final_pieces(self._reduced) if handle.offloads else []
        self._reduced = self._reduced.to(average.dtype).add_(average)
        return []

    def _final_pieces(self, average: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the pieces of an average with their parameters, or nothing if `.grad` will be something else."""
        handle = self._handle
        has_grads = self._reduced_grads.has_others() if self._reduced_grads else not is_cleared(self._handle)
        if (
            self._averaged is not None
            or has_grads
            or self._casts_average
            or any(map(has_hooks, handle.stepped))
        ):
            return []
        pieces = handle.pieces_of(average) if handle.use_orig_params else [average]
        pairs = zip(handle.stepped, pieces, strict=True)
        return [(param, piece) for param, piece in pairs if piece is not None and param.requires_grad]

    def end_backward(self, synced: bool) -> None:
        """Publish the gradients of this backward in `.grad`."""
        self.journal.close()
        if self._reduced_grads is not None:
            self._reduced_grads.release()
            self._reduced_grads.clear()
            self._reduced_grads = None
        if not synced:
            # If this backward added nothing, the user's changes of `.grad` stay until the next one.
            if self._unreduced is not None and not self._unreduced.is_published:
                self._set_current_aside(self._unreduced)
                self._unreduced.publish()
            return
        reduced, self._reduced = self._reduced, None
        if reduced is None and self._averaged is None:
            return  # `.grad` is complete
        averaged, self._averaged = _sum(self._averaged, self.current()), None
        if reduced is not None:
            run_hooks_after_reduction(self._handle, reduced)
        averaged = _sum(averaged, reduced)
        assert averaged is not None
        if self._casts_average:
            averaged = averaged.to(self._handle.compute_dtype)
        self.publish(averaged)
        if reduced is not None:
            call_accumulation_hooks(self._handle)

    def _set_current_aside(self, unreduced: UnreducedGrads) -> None:
        """Keep the average in `.grad` aside, or add it to the unreduced sum if the gradients are not sharded."""
        current = self.current()
        if self._handle.is_sharded:
            self._averaged = _sum(self._averaged, current)
        elif current is not None:
            unreduced.add_average(current)

    def publish(self, shard: Tensor) -> None:
        """Publish a shard [shard_numel] as the `.grad` of the stepped parameters."""
        handle = self._handle
        if not handle.use_orig_params:
            set_grad(handle.flat_param, shard)
            return
        self._published, self._was_published = shard, True
        pieces = handle.pieces_of(shard)
        self._grad_places = [None if piece is None else (piece.data_ptr(), piece.shape) for piece in pieces]
        for parameter, piece in zip(handle.parameters, pieces, strict=True):
            if piece is None or not parameter.requires_grad:
                parameter.grad = None
            else:
                set_grad(parameter, piece)

    @contextmanager
    def on_flat_param(self) -> Generator[None]:
        """Context manager in which the current gradients are `flat_param.grad`, which may be moved or cast."""
        handle = self._handle
        if self._unreduced is not None:
            self.begin_backward()
        unreduced = self._unreduced
        shard = self.current() if unreduced is None else unreduced.total
        if handle.use_orig_params:
            for parameter in handle.parameters:
                parameter.grad = None
        if shard is not None:
            set_grad(handle.flat_param, shard)
        try:
            yield
        finally:
            moved, handle.flat_param.grad = handle.flat_param.grad, None
            if moved is not None:
                self._publish_moved(moved, is_unreduced=unreduced is not None)

    def _publish_moved(self, moved: Tensor, is_unreduced: bool) -> None:
        if not is_unreduced:
            self.publish(moved)
            return
        moved = moved.detach()
        self._unreduced = UnreducedGrads(self._handle, moved)
        if self._averaged is not None:
            self._averaged = self._averaged.to(self._handle.flat_param)
        self._unreduced.publish()

    def current(self) -> Tensor | None:
        """Return the content of `.grad`, [shard_numel], or None if there is none or it is not an average."""
        is_unreduced = self._unreduced is not None and self._unreduced.was_published
        if is_unreduced or self._reduced_grads is not None:
            return None
        return self._average_in_grad()

    def _average_in_grad(self) -> Tensor | None:
        handle = self._handle
        if not handle.use_orig_params:
            return handle.flat_param.grad
        present = [parameter.grad for parameter in handle.parameters]
        if all(grad is None for grad in present):
            return None
        if self._published is not None and self._is_as_published(present):
            return self._published
        return self._copy_to_shard(present)

    def _is_as_published(self, present: Sequence[Tensor | None]) -> bool:
        for grad, place in zip(present, self._grad_places, strict=False):
            if place is not None and (grad is None or (grad.data_ptr(), grad.shape) != place):
                return False
        return len(self._grad_places) == len(present)

    def _copy_to_shard(self, present: Sequence[Tensor | None]) -> Tensor:
        """Copy the gradients into a new shard after the user replaced some or set some to None, which become zeros."""
        handle = self._handle
        keep_for_current_stream(present)  # the caller may replace them
        dtype = next(grad.dtype for grad in present if grad is not None)
        shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.flat_param.device)
        for piece, grad in zip(handle.pieces_of(shard), present, strict=True):
            if piece is not None and grad is not None:
                piece.copy_(grad)
        return shard

    def _set_averaged(self, index: int, grad: Tensor | None) -> None:
        """Replace the average of one parameter, by zeros if `grad` is None."""
        if self._averaged is None and grad is not None:
            self._averaged = grad.new_zeros(self._handle.layout.shard_numel)
        piece = self._averaged
        if piece is not None and self._handle.use_orig_params:
            piece = self._handle.pieces_of(piece)[index]
        if piece is not None:
            keep_for_current_stream([grad])
            piece.zero_() if grad is None else piece.copy_(grad)

    def _forget_unreduced(self) -> None:
        self._unreduced = None

    def _forget_reduced(self) -> None:
        self._reduced = None

    def _restore_unreduced(self, unreduced: UnreducedGrads | None, earlier: Tensor | None) -> None:
        """Undo `_take_unreduced`. What the user has cleared in `.grad` since then stays cleared."""
        self._unreduced, self._before_microbatch = unreduced, earlier
        if earlier is not None:
            self._earlier_keys = []
        reduced_grads, self._reduced_grads = self._reduced_grads, None
        if reduced_grads is None or unreduced is None:
            return
        reduced_grads.release()
        views = unreduced.grad_views
        for index in reduced_grads.replaced:
            parameter = self._handle.stepped[index]
            # Without a clear, `.grad` is a gradient of the backward that raised.
            is_cleared = parameter.grad is None or not parameter.grad.any()
            parameter.grad = None
            if not is_cleared:
                set_grad(parameter, views[index].detach())

    def _mark_incomplete(self) -> None:
        if self._unreduced is not None:
            self._unreduced.is_incomplete = True


def _sum(earlier: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients in the dtype of the new gradient. May write to the earlier gradient."""
    if earlier is None or new is None:
        return new if earlier is None else earlier
    if earlier.dtype is not new.dtype:
        # The earlier gradient is freed here, and its backward may have allocated it on another stream.
        keep_for_current_stream([earlier])
    return earlier.to(new.dtype).add_(new)
