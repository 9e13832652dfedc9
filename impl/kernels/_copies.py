"""Copies from device to device; nothing else of ours asks for one that does not block.

What a copy from a device to the host returns, if it does not block, is memory that is still being filled: who reads it
before an event that was recorded behind the copy reads what was there before. So a copy to the host blocks, but for
`HostCopy`, whose numbers cannot be had before their event, and `sent_to_host`, whose callers wait for many at once.
Towards a device nothing has to wait: memory of the host that is not pinned has been read when the copy returns, and
pinned memory that is freed by then is kept by torch's allocator for as long as the copy takes. It must not be written
to meanwhile. Optimizers write to offloaded shards: the root of sharded modules makes the host wait before that.
"""

import torch
from torch import Tensor

_STREAMS_TELL = hasattr(torch.Stream, "is_capturing")  # since torch 2.13


def placed(
    tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None, *, copy: bool = False
) -> Tensor:
    """`tensor` on `device`, and in `dtype`, if given; with `copy`, never itself.

    Sync: none on a device; one on the host, of what lies on a device.
    """
    # To ask where it is costs half of what `to` does.
    if tensor.device == device and not copy and (dtype is None or tensor.dtype is dtype):
        return tensor
    return tensor.to(device, dtype, non_blocking=device.type != "cpu", copy=copy)


def copy_into_(target: Tensor, source: Tensor) -> None:
    """Sync: as `placed`."""
    target.copy_(source, non_blocking=not target.is_cpu)


def sent_to_host(tensor: Tensor) -> Tensor:
    """A copy on the host that is still being filled: nobody may read it before the host has waited for this stream.

    Sync: none.
    """
    return tensor.to("cpu", non_blocking=True)


class HostCopy:
    """A tensor's numbers on their way to the host; where `has_host_copies`."""

    def __init__(self, tensor: Tensor) -> None:
        self._numbers = tensor.to("cpu", non_blocking=True, copy=True)
        self._device = tensor.device
        self._arrived: torch.Event | None = None
        if not tensor.is_cpu:
            self._arrived = torch.Event(tensor.device)
            self._arrived.record(torch.accelerator.current_stream(tensor.device))

    def numbers(self) -> list[float] | None:
        """None while they are on their way, as far as may be asked. Sync: none."""
        if self._arrived is not None:
            # Such a question ends the capture.
            if is_capturing(self._device) or not self._arrived.query():
                return None
            self._arrived = None
        return self._numbers.tolist()


def has_host_copies(device: torch.device) -> bool:
    """Whether a `HostCopy` can be made: not without events, nor while a graph is captured, which would keep it.

    Nor in traced code, whose writes come after the event that should stand behind them.
    """
    if device.type == "cpu":
        return True
    if torch.compiler.is_compiling():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type and not is_capturing(device)


def is_capturing(device: torch.device) -> bool:
    """Whether what is issued to the device's current stream is captured in a graph, by whomever."""
    if not _STREAMS_TELL:
        if device.type != "cuda":
            return False
        if device.index == torch.cuda.current_device():  # to enter it would take longer than the query
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return False
    return torch.accelerator.current_stream(device).is_capturing()
