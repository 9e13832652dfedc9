"""Copies between devices, and the current stream. No other module of `impl` makes a non-blocking copy.

A non-blocking copy from a device returns host memory that is still being filled. Reading it before an event that was
recorded after the copy gives old contents. So copies to the host block, except `HostCopy`, which checks its event, and
`copy_to_host_async`, whose callers wait for many copies at once.

A copy to a device need not wait. Pageable host memory has been read when the copy returns, and torch's allocator keeps
freed pinned memory until the copy has ended. Pinned memory must not be written to meanwhile: before an optimizer writes
to offloaded shards, the root of sharded modules makes the host wait.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# True since torch 2.13.
_HAS_STREAM_QUERY = hasattr(torch.Stream, "is_capturing")


def to_device(
    tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None, *, copy: bool = False
) -> Tensor:
    """Return `tensor` on `device` and in `dtype`. With `copy`, always return a copy.

    Sync: one for a copy from a device to the host, else none.
    """
    # This check takes half of the time of `to`.
    if tensor.device == device and not copy and (dtype is None or tensor.dtype is dtype):
        return tensor
    return tensor.to(device, dtype, non_blocking=device.type != "cpu", copy=copy)


def copy_into_(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`. Sync: as `to_device`."""
    target.copy_(source, non_blocking=not target.is_cpu)


def copy_to_host_async(tensor: Tensor) -> Tensor:
    """Start a non-blocking copy to the host. Synchronise the current stream before reading the result.

    Sync: none.
    """
    return tensor.to("cpu", non_blocking=True)


class HostCopy:
    """Non-blocking copy of the numbers of a 1-dim tensor to the host, on devices with `has_host_copies`."""

    def __init__(self, tensor: Tensor) -> None:
        self._numbers = tensor.to("cpu", non_blocking=True, copy=True)
        self._device = tensor.device
        self._arrived: torch.Event | None = None
        if not tensor.is_cpu:
            self._arrived = torch.Event(tensor.device)
            self._arrived.record(torch.accelerator.current_stream(tensor.device))

    def numbers(self) -> list[float] | None:
        """Return the numbers, or None if they have not arrived or a graph is captured. Sync: none."""
        if self._arrived is not None:
            # Querying the event would end the capture.
            if is_capturing(self._device) or not self._arrived.query():
                return None
            self._arrived = None
        return self._numbers.tolist()


def has_host_copies(device: torch.device) -> bool:
    """Return whether a `HostCopy` is possible on `device`.

    It needs events, and is not possible while a graph is captured, nor in traced code, whose writes would come after
    the event.
    """
    if device.type == "cpu":
        return True
    if torch.compiler.is_compiling():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type and not is_capturing(device)


def keep_for_current_stream(tensors: Iterable[Tensor | None]) -> None:
    """Keep the memory of tensors, once they are freed, until the current stream has read them.

    Otherwise the stream that allocated a tensor may get the memory at once. Nothing changes if it is the current one,
    or on a device without streams. Sync: none.
    """
    stream: torch.Stream | None = None
    for tensor in tensors:
        if tensor is None or tensor.is_cpu or tensor.is_mps or tensor.is_meta:
            continue
        if tensor.layout is not torch.strided:  # no operator for it
            continue
        if stream is None or stream.device != tensor.device:
            stream = torch.accelerator.current_stream(tensor.device)
        tensor.record_stream(stream)


def is_capturing(device: torch.device) -> bool:
    """Return whether the device's current stream is being captured in a graph."""
    if not _HAS_STREAM_QUERY:
        if device.type != "cuda":
            return False
        if device.index == torch.cuda.current_device():  # shortcut: entering a device is slow
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return False
    return torch.accelerator.current_stream(device).is_capturing()
