"""Triton's kernels as work of the device's streams: its interpreter runs them when a stream gets to them.

TRITON_INTERPRET=1 has to be set before Triton is imported. The tensors that a kernel gets count as read. Only
`touching` can declare which of them it writes, and which memory it reaches by addresses alone. Without it, hazards of
writes are missed, and memory that only an address reaches is poisoned as soon as its tensor is freed. Inside it, a
kernel that reaches any other memory is stopped first, because that memory belongs to another tensor or to none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from conformance.simulator import device

_Touched = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
_Spans = tuple[np.ndarray, np.ndarray]  # first addresses in order, and ends
_touched: ContextVar[_Touched | None] = ContextVar("_touched", default=None)
_reachable: ContextVar[_Spans | None] = ContextVar("_reachable", default=None)
_interpret = GridExecutor.__call__


@contextlib.contextmanager
def touching(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Declare what kernels launched in this context read besides their arguments, and what they write."""
    token = _touched.set((reads, writes))
    try:
        yield
    finally:
        _touched.reset(token)


def serve(launch: Callable[..., None]) -> None:
    """Replace the launch of kernels whose arguments are on the device by `launch`."""

    def launched(executor: Any, *arguments: Any, **named: Any) -> None:
        tensors = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)]
        declared = _touched.get()
        reads, writes = declared or ((), ())
        spans = None if declared is None else _spans([*tensors, *reads, *writes])
        if not any(tensor.device.type == device.NAME for tensor in tensors):
            _run(spans, executor, arguments, named)
            return
        # These views keep no memory alive. Like on any device, memory may be freed before its kernel runs.
        on_host = [_host_view(value) for value in arguments]
        named_on_host = {name: _host_view(value) for name, value in named.items()}
        run = functools.partial(_run, spans, executor, on_host, named_on_host)
        launch(run, [*tensors, *reads], writes, name=executor.fn.__name__)

    GridExecutor.__call__ = launched
    for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas"):
        setattr(InterpreterBuilder, name, _checked(getattr(InterpreterBuilder, name)))


def _run(spans: _Spans | None, executor: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
    token = _reachable.set(spans)
    try:
        _interpret(executor, *arguments, **named)
    finally:
        _reachable.reset(token)


def _host_view(argument: Any) -> Any:
    return device.host_view(argument) if isinstance(argument, torch.Tensor) else argument


def _spans(tensors: Sequence[torch.Tensor]) -> _Spans:
    storages = {
        storage.data_ptr(): storage.nbytes() for tensor in tensors if (storage := tensor.untyped_storage())
    }
    starts = np.array(sorted(storages), dtype=np.uint64)
    return starts, starts + np.array([storages[int(start)] for start in starts], dtype=np.uint64)


def _checked(access: Callable[..., Any]) -> Callable[..., Any]:
    """Return `access` of the interpreter with a check that the running kernel was given the memory."""
    parameters = inspect.signature(access)

    @functools.wraps(access)
    def checked(*arguments: Any) -> Any:
        spans = _reachable.get()
        if spans is not None:
            bound = parameters.bind(*arguments).arguments
            pointers = bound["ptrs"] if "ptrs" in bound else bound["ptr"]
            addresses = pointers.data[bound["mask"].data] if "mask" in bound else pointers.data
            _check(spans, addresses, pointers.get_element_ty().primitive_bitwidth // 8)
        return access(*arguments)

    return checked


def _check(spans: _Spans, addresses: np.ndarray, item_bytes: int) -> None:
    starts, stops = spans
    before = np.searchsorted(starts, addresses, side="right")
    strays = (before == 0) | (addresses + np.uint64(item_bytes) > np.append(stops, 0)[before - 1])
    if strays.any():
        raise RuntimeError(
            f"illegal memory access: the kernel reaches {int(addresses[strays][0]):#x}, which is in none of the"
            f" {len(starts)} storages that it was given or that `touching` names"
        )
