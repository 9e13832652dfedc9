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
        in_full_precision = any(
            _evaluates_in_full_precision(wrapper) for wrapper in _deciding(self._wrappers_alive())
        )
        if in_full_precision:
            self._restore()
        elif self._are_in_full_precision:
            self._cast()
        self._are_in_full_precision = in_full_precision

    def _cast(self) -> None:
        """Cast each floating-point buffer as the innermost wrapper around it requests."""
        cast: set[Tensor] = set()
        for wrapper in reversed(self._wrappers_alive()):
            for name, buffer in wrapper.named_buffers():
                if buffer in cast:
                    continue
                cast.add(buffer)
                if clean_name(name) not in wrapper._ignored.buffer_names:
                    self._move(buffer, wrapper.mixed_precision.buffer_dtype)

    def _restore(self) -> None:
        for outermost in self._wrappers_alive()[:1]:
            for name, buffer in outermost.named_buffers():
                self._move(buffer, outermost._buffer_dtypes.get(clean_name(name)))

    def _wrappers_alive(self) -> list[Wrapper]:
        return [wrapper for wrapper in (reference() for reference in self._wrappers) if wrapper is not None]

    def _move(self, buffer: Tensor, dtype: torch.dtype | None) -> None:
        moved = buffer.to(self._device, dtype if buffer.is_floating_point() else None)
        if moved is not buffer:
            keep_for_current_stream([local_of(buffer)])
            buffer.data = moved


def _deciding(wrappers: Sequence[Wrapper]) -> Sequence[Wrapper]:
    """Return the wrappers that decide for the root: the outermost one, or all if that one has no parameters."""
    return wrappers[:1] if wrappers and wrappers[0]._unit.param_groups else wrappers


def _evaluates_in_full_precision(wrapper: Wrapper) -> bool:
    """Return whether the wrapper evaluates in full precision although it trains in a lower one."""
    return not wrapper._fsdp_wrapped_module.training and any(
        {handle.compute_dtype, handle.reduce_dtype} != {handle.dtype} for handle in wrapper._unit.param_groups
    )
