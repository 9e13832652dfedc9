"""The third form of impl's streams: it runs everything at once and logs what a device would have been given.

The log holds what was really issued, taken from the dispatcher: which operator ran in which stream, over which memory,
and when memory came and went. Nothing of it rests on what the runtime says about itself but streams, events and waits.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from impl.distributed.fsdp._engine.streams import StreamRole
from impl.distributed.fsdp.tests.happens_before import (
    HOST,
    Allocation,
    Entry,
    Free,
    HostBlock,
    Operation,
    Record,
    Wait,
)

# Operators that describe or allocate memory without access to it.
_TOUCH_NOTHING = {
    "set_",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
}
# Operators whose schemas do not say that the first argument is written to.
_WRITES_FIRST = {
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allreduce_",
    "alltoall_base_",
    "broadcast_",
}


@dataclass
class _Memory:
    number: int
    storage: StorageWeakRef
    is_held: bool


class RecordingStreams(TorchDispatchMode):
    """Records the work issued while it is entered. It answers the calls of `_engine.streams.Streams` at any time."""

    is_async = True

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Entry] = []
        self._streams = [StreamRole.COMPUTE.value]
        self._numbers = itertools.count()
        self._events = itertools.count()
        self._memory: dict[int, _Memory] = {}
        self._patches = ExitStack()

    # Calls of the runtime

    @contextmanager
    def on(self, role: StreamRole) -> Generator[None]:
        if role is StreamRole.COMPUTE:
            yield
            return
        with self._in(role.value):
            yield

    def record(self, role: StreamRole) -> int:
        return self._recorded(self._name(role))

    def wait(self, role: StreamRole, event: int | None) -> None:
        self._notice_freed()
        if event is not None:
            self.log.append(Wait(self._name(role), event))

    def current(self) -> str:
        return self._streams[-1]

    def record_in(self, stream: str) -> int:
        return self._recorded(stream)

    def wait_in(self, stream: str, event: int | None) -> None:
        self._notice_freed()
        if event is not None:
            self.log.append(Wait(stream, event))

    def block(self, event: int | None) -> None:
        self._notice_freed()
        if event is not None:
            self.log.append(HostBlock(event))

    def _name(self, role: StreamRole) -> str:
        """COMPUTE is whatever stream is current."""
        return self._streams[-1] if role is StreamRole.COMPUTE else role.value

    def _recorded(self, stream: str) -> int:
        self._notice_freed()
        event = next(self._events)
        self.log.append(Record(stream, event))
        return event

    @contextmanager
    def beside(self, stream: str) -> Generator[None]:
        """A stream of the user's own, which has waited for the one that is current."""
        self._notice_freed()
        self.log.append(Wait(stream, self._recorded(self._streams[-1])))
        with self._in(stream):
            yield

    def event(self) -> int:
        """Return an event that a user has recorded on the current stream."""
        return self._recorded(self._streams[-1])

    @contextmanager
    def _in(self, stream: str) -> Generator[None]:
        self._notice_freed()
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    # Observed work

    def __enter__(self) -> RecordingStreams:
        self._patches.enter_context(_storages_report_to(self))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()

    @contextmanager
    def steps_on_host(self) -> Generator[None]:
        """Context manager in which optimizer steps read and write memory of the host, on the host."""
        entered = ExitStack()
        hooks = (
            register_optimizer_step_pre_hook(lambda *_: entered.enter_context(self._in(HOST))),
            register_optimizer_step_post_hook(lambda *_: entered.close()),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self._notice_freed()
        outputs = func(*args, **(kwargs or {}))
        arguments = list(_arguments(func, args, kwargs or {}))
        known = {self._numbered(tensor) for tensor, _ in arguments}
        new_tensors = [t for t in _tensors(outputs) if _key(t) not in self._memory]
        for tensor in new_tensors:
            self.log.append(Allocation(self._streams[-1], self._numbered(tensor)))
        if not (func.is_view or _short(func) in _TOUCH_NOTHING):
            reads = {self._numbered(t) for t, is_written in arguments if t.numel() and not is_written}
            writes = {self._numbered(t) for t, is_written in arguments if t.numel() and is_written}
            writes |= {self._numbered(t) for t in new_tensors if t.numel()} - known
            self.log.append(
                Operation(self._streams[-1], _described(func), tuple(sorted(reads)), tuple(sorted(writes)))
            )
        if _short(func) == "_local_scalar_dense":
            self.log.append(HostBlock(self._recorded(self._streams[-1])))
        return outputs

    def resized(self, storage: UntypedStorage, before: int) -> None:
        self._notice_freed()
        memory = self._known(storage)
        if before and not storage.nbytes():
            memory.is_held = False
            self.log.append(Free(memory.number))
        elif storage.nbytes() and not before:
            memory.is_held = True
            self.log.append(Allocation(self._streams[-1], memory.number))

    def _numbered(self, tensor: Tensor) -> int:
        return self._known(tensor.untyped_storage()).number

    def _known(self, storage: UntypedStorage) -> _Memory:
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = _Memory(next(self._numbers), StorageWeakRef(storage), storage.nbytes() > 0)
            self._memory[storage._cdata] = memory
        return memory

    def _notice_freed(self) -> None:
        for key, memory in [
            (k, m) for k, m in self._memory.items() if UntypedStorage._expired(m.storage.cdata)
        ]:
            del self._memory[key]
            if memory.is_held:
                self.log.append(Free(memory.number))


@contextmanager
def _storages_report_to(streams: RecordingStreams) -> Generator[None]:
    """Resizing a storage passes by the dispatcher."""
    resize = UntypedStorage.resize_

    def resize_and_tell(self: UntypedStorage, size: int) -> UntypedStorage:
        before = self.nbytes()
        result = resize(self, size)
        streams.resized(self, before)
        return result

    UntypedStorage.resize_ = resize_and_tell
    try:
        yield
    finally:
        del UntypedStorage.resize_  # the base class has the method


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _short(func: OpOverload) -> str:
    return func._schema.name.partition("::")[2]


def is_of_impl(frame: types.FrameType) -> bool:
    """Whether it runs a line of impl that is not a test's."""
    name = str(frame.f_globals.get("__name__"))
    return name.startswith("impl.") and ".tests." not in name


def _described(func: OpOverload) -> str:
    """The operator, and what of impl called it."""
    frame = sys._getframe(2)
    while frame is not None and not is_of_impl(frame):
        frame = frame.f_back
    return _short(func) if frame is None else f"{_short(func)} of {frame.f_code.co_qualname}"


def _arguments(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yield each tensor argument, and whether it is written to."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if _short(func) in _WRITES_FIRST:
            is_written = index == 0
        for tensor in _tensors(value):
            yield tensor, is_written


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield value._local_tensor
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
