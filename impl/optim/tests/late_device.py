"""A device whose copies to the host are late, for whoever asks for them without blocking.

Tensors on `late` are plain ones of torch's own type; their memory lies on the host, and the CPU's operators are carried
out on it at once. But what a copy to the host with `non_blocking=True` returns, or writes to, is `Arriving`: nobody may
read a number of it until an event that was recorded behind the copy has been asked, or waited for, with success. Who
reads sooner stands in `early_reads`. Who reads by another name, or by the address, reads poison.

The device is registered with torch when this is imported, for good: by a process of its own alone.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._C import DispatchKey, DispatchKeySet
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("late")
LATE, HOST = torch.device("late", 0), torch.device("cpu")

copies: list[HostCopy] = []  # that did not block
early_reads: list[str] = []

_aten = torch.ops.aten
_AS_META = DispatchKeySet(DispatchKey.Meta)  # shapes and strides without memory
_memory: dict[int, tuple[StorageWeakRef, UntypedStorage]] = {}  # of each storage on the device, on the host


@dataclass(eq=False)
class HostCopy:
    target: Tensor
    numbers: Tensor
    asked_in: str
    has_arrived: bool = False

    def arrive(self) -> None:
        if not self.has_arrived:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self.target.copy_(self.numbers)
            self.has_arrived = True


class Arriving(Tensor):
    """What a copy that does not block writes to."""

    host_copy: HostCopy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TELL_NO_NUMBER:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Arriving) and not tensor.host_copy.has_arrived:
                    early_reads.append(f"{tensor.host_copy.asked_in}, read in {_place()}")
                    tensor.host_copy.arrive()  # that the next one shows too
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_TELL_NO_NUMBER = {
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "is_cpu", "is_sparse", "layout", "ndim", "requires_grad", "shape")
} | {Tensor.dim, Tensor.numel, Tensor.size}


class Event:
    """In the place of `torch.Event`: of two questions it answers the first by no."""

    is_forbidden = False

    def __init__(self, device: torch.device) -> None:
        assert device == LATE
        self._behind: list[HostCopy] = []
        self._questions = 0

    def record(self, stream: torch.Stream) -> None:
        assert stream.device == LATE
        self._behind = [copy for copy in copies if not copy.has_arrived]

    def query(self) -> bool:
        assert not self.is_forbidden, "an event was asked while a graph was captured"
        self._questions += 1
        if self._questions > 1:
            self.synchronize()
        return self._questions > 1

    def synchronize(self) -> None:
        for copy in self._behind:
            copy.arrive()


@contextlib.contextmanager
def capturing() -> Generator[None]:
    """Inside, no event may be asked."""
    Event.is_forbidden = True
    try:
        yield
    finally:
        Event.is_forbidden = False


def _place() -> str:
    """The innermost line of impl, or of torch's optimizers, which it calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        _, ours, path = frame.f_code.co_filename.rpartition("/impl/")
        if ours or "/torch/optim/" in frame.f_code.co_filename:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "the program"


def _is_late(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == LATE


def _numbers(tensor: Tensor) -> Tensor:
    """Itself, or as a tensor on the host over the same memory."""
    if not _is_late(tensor):
        return tensor
    _, memory = _memory[tensor.untyped_storage()._cdata]
    over = torch.empty(0, dtype=tensor.dtype, device=HOST)
    return over.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _on_device(numbers: Tensor) -> Tensor:
    for key in [key for key, (storage, _) in _memory.items() if storage.expired()]:
        del _memory[key]
    tensor = torch._C._acc.create_empty_tensor((0,), numbers.dtype)
    storage = tensor.untyped_storage()
    _memory[storage._cdata] = StorageWeakRef(storage), numbers.untyped_storage()
    return _laid_out_as(numbers, tensor)


def _laid_out_as(numbers: Tensor, tensor: Tensor) -> Tensor:
    place = numbers.storage_offset(), numbers.shape, numbers.stride()
    return _aten.set_.source_Storage_storage_offset.redispatch(
        _AS_META, tensor, tensor.untyped_storage(), *place
    )


def _carried_out(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What `func` makes of tensors on the device: the CPU's numbers, and the same aliases."""
    given: list[tuple[Tensor, Tensor]] = []

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return HOST
        if not _is_late(value):
            # As on CUDA, where numbers alone may come from the host.
            assert not value.dim(), f"{func} is given a tensor on the host"
            return value
        given.append((value, _numbers(value)))
        return given[-1][1]

    def back(result: Tensor) -> Tensor:
        for tensor, numbers in given:
            if result is numbers:
                return tensor
            if result.untyped_storage()._cdata == numbers.untyped_storage()._cdata:
                place = result.shape, result.stride(), result.storage_offset()
                return _aten.as_strided.default.redispatch(_AS_META, tensor, *place)
        return _on_device(result)

    args, kwargs = tree_map_only((Tensor, torch.device), on_host, (args, kwargs))
    kwargs.pop("pin_memory", None)
    results = func(*args, **kwargs)
    for tensor, numbers in given:
        if tensor.shape != numbers.shape:  # what is given as `out` may have to grow
            _laid_out_as(numbers, tensor)
    return tree_map_only(Tensor, back, results)


def _send_home(target: Tensor, numbers: Tensor) -> Tensor:
    copies.append(HostCopy(target, numbers.expand_as(target).to(target.dtype, copy=True), _place()))
    target.fill_(math.nan if target.is_floating_point() else 77)
    target.__class__ = Arriving
    arriving: Any = target
    arriving.host_copy = copies[-1]
    return arriving


def _to_copy(tensor: Tensor, *, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
    kwargs.pop("pin_memory", None)
    numbers = _aten._to_copy(_numbers(tensor), **kwargs)
    if torch.device(device or tensor.device).type == LATE.type:
        return _on_device(numbers)
    return _send_home(torch.empty_like(numbers), numbers) if non_blocking else numbers


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if non_blocking and not _is_late(target):
        _send_home(target, _numbers(source))
    else:
        _numbers(target).copy_(_numbers(source))
    return target


def _collective(func: Any) -> Any:
    """The default group carries it out, on the host."""
    place = [argument.name for argument in func._schema.arguments].index("process_group")

    def issue(*args: Any) -> Any:
        on_host: list[Any] = tree_map_only(Tensor, _numbers, [*args])
        assert dist.group.WORLD is not None
        on_host[place] = dist.group.WORLD.boxed()
        _, work = func(*on_host)
        return args[0], work

    return issue


_everything = torch.library.Library("_", "IMPL")
_everything.fallback(_carried_out, "PrivateUse1")
_operators = torch.library.Library("aten", "IMPL")
_operators.impl("_to_copy", _to_copy, "PrivateUse1")
_operators.impl("copy_", _copy_, "PrivateUse1")
_operators.impl("_local_scalar_dense", lambda tensor: _numbers(tensor).item(), "PrivateUse1")
_collectives = torch.library.Library("c10d", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch has kernels for those, which ask for a backend of the device's
    for name in ("allreduce_", "allgather_"):
        _collectives.impl(name, _collective(getattr(torch.ops.c10d, name).default), "PrivateUse1")
torch.Event = Event
