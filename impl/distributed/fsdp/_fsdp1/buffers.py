"""Buffers of a root: they are not sharded, only moved to the device and dtype in which the unit computes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._params.managed import clean_name
from impl.distributed.fsdp._params.tensor_parallel import local_of
from impl.kernels import keep_for_current_stream


class Buffers:
    """All buffers of a root, once it is known.

    Args:
        wrappers: wrappers of the root, the outermost first. Referenced weakly, because they refer to the root.
        device: compute device.
    """

    def __init__(self, wrappers: Sequence[Wrapper], device: torch.device) -> None:
        self._wrappers = [weakref.ref(wrapper) for wrapper in wrappers]
        self._device = device
        self._may_evaluate_in_full_precision = any(wrapper._use_full_prec_in_eval for wrapper in wrappers)
        self._are_in_full_precision = False
        self._cast()

    def begin_forward(self) -> None:
        """Restore the buffers' original dtypes before a forward of the root, if it evaluates in full precision."""
        if not self._may_evaluate_in_full_precision:
            return
        wrappers = self._live_wrappers()
        # The outermost wrapper decides, or all of them if it has no parameters.
        if wrappers and wrappers[0]._unit.param_groups:
            wrappers = wrappers[:1]
        in_full_precision = any(map(_evaluates_in_full_precision, wrappers))
        if in_full_precision:
            self._restore()
        elif self._are_in_full_precision:
            self._cast()
        self._are_in_full_precision = in_full_precision

    def _cast(self) -> None:
        """Cast each floating-point buffer as the innermost wrapper around it requests."""
        cast: set[Tensor] = set()
        for wrapper in reversed(self._live_wrappers()):
            for name, buffer in wrapper.named_buffers():
                if buffer in cast:
                    continue
                cast.add(buffer)
                if clean_name(name) not in wrapper._ignored.buffer_names:
                    self._move(buffer, wrapper.mixed_precision.buffer_dtype)

    def _restore(self) -> None:
        for outermost in self._live_wrappers()[:1]:
            for name, buffer in outermost.named_buffers():
                self._move(buffer, outermost._buffer_dtypes.get(clean_name(name)))

    def _live_wrappers(self) -> list[Wrapper]:
        return [wrapper for wrapper in (reference() for reference in self._wrappers) if wrapper is not None]

    def _move(self, buffer: Tensor, dtype: torch.dtype | None) -> None:
        moved = buffer.to(self._device, dtype if buffer.is_floating_point() else None)
        if moved is not buffer:
            keep_for_current_stream([local_of(buffer)])
            buffer.data = moved


def _evaluates_in_full_precision(wrapper: Wrapper) -> bool:
    """Return whether the wrapper evaluates in full precision although it trains in a lower one."""
    return not wrapper._fsdp_wrapped_module.training and any(
        {handle.compute_dtype, handle.reduce_dtype} != {handle.dtype} for handle in wrapper._unit.param_groups
    )
