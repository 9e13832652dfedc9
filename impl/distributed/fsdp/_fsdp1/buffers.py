"""Buffers are not sharded; they are only brought to the device and the dtype in which the unit computes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from impl.distributed.fsdp._fsdp1.wrapper import Wrapper
from impl.distributed.fsdp._params.managed import clean_name


class Buffers:
    """All buffers of a root, once it is found.

    Args:
        wrappers: the FullyShardedDataParallel in it, the outermost first; held weakly, since they hold the root.
        device: where it computes.
    """

    def __init__(self, wrappers: Sequence[Wrapper], device: torch.device) -> None:
        self._wrappers = [weakref.ref(one) for one in wrappers]
        self._device = device
        self._may_evaluate_in_full_precision = any(one._use_full_prec_in_eval for one in wrappers)
        self._are_in_full_precision = False
        self._cast()

    def begin_forward(self) -> None:
        """Before one of the root: in the dtypes that they were wrapped with, if it evaluates in full precision."""
        if not self._may_evaluate_in_full_precision:
            return
        in_full_precision = any(_evaluates_in_full_precision(one) for one in _deciding(self._found()))
        if in_full_precision:
            self._restore()
        elif self._are_in_full_precision:
            self._cast()
        self._are_in_full_precision = in_full_precision

    def _cast(self) -> None:
        """Each as the innermost of the wrappers around it wants it; what holds no floating-point numbers stays so."""
        seen: set[Tensor] = set()
        for wrapper in reversed(self._found()):
            for name, buffer in wrapper.named_buffers():
                if buffer in seen:
                    continue
                seen.add(buffer)
                if clean_name(name) not in wrapper._ignored.buffer_names:
                    self._bring(buffer, wrapper.mixed_precision.buffer_dtype)

    def _restore(self) -> None:
        for outermost in self._found()[:1]:
            for name, buffer in outermost.named_buffers():
                self._bring(buffer, outermost._buffer_dtypes.get(clean_name(name)))

    def _found(self) -> list[Wrapper]:
        return [wrapper for wrapper in (each() for each in self._wrappers) if wrapper is not None]

    def _bring(self, buffer: Tensor, dtype: torch.dtype | None) -> None:
        buffer.data = buffer.to(self._device, dtype if buffer.is_floating_point() else None)


def _deciding(wrappers: Sequence[Wrapper]) -> Sequence[Wrapper]:
    """The outermost decides for all; one without parameters leaves it to the others."""
    return wrappers[:1] if wrappers and wrappers[0]._unit.param_groups else wrappers


def _evaluates_in_full_precision(wrapper: Wrapper) -> bool:
    """Instead of in a lower one."""
    return not wrapper._fsdp_wrapped_module.training and any(
        {handle.compute_dtype, handle.reduce_dtype} != {handle.dtype} for handle in wrapper._unit.param_groups
    )
