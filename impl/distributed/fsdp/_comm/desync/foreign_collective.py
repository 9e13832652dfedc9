"""Search for a user's collective of torch.distributed in which a thread of this process waits.

User collectives are not recorded. Their functions are visible on the thread's stack.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Generator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Collectives that no rank leaves before all ranks have entered them, and that do nothing else. Collectives of objects
# are left out: they still unpickle when other ranks have gone on, and wait only inside one of these.
_SYNCHRONISING = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    }
)


class ForeignCollective(NamedTuple):
    frame: int  # identifies the call
    name: str
    # Ranks that it waits for, as numbers of the default group.
    ranks: tuple[int, ...]


_gc_lock = threading.Lock()
# A forked child inherits neither a taken lock nor disabled garbage collection.
os.register_at_fork(
    before=_gc_lock.acquire,
    after_in_parent=_gc_lock.release,
    after_in_child=_gc_lock.release,
)


@contextlib.contextmanager
def _no_garbage_collection() -> Generator[None]:
    # Python 3.12 and later collect only between two instructions of Python.
    if sys.version_info >= (3, 12):
        yield
        return
    with _gc_lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


@_no_garbage_collection()
def foreign_collective(thread: int) -> ForeignCollective | None:
    """Return the innermost user collective that a thread is in, or None.

    Equal results of two calls mean that it waits.

    In Python 3.11 garbage collection is disabled during the call. It could run while Python creates the object of a
    frame. A finalizer (of a tensor, for example) then lets the other thread run, and the frame is gone too early.
    """
    frame: Any = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == distributed_c10d.__file__ and code.co_name in _SYNCHRONISING:
            try:
                ranks = dist.get_process_group_ranks(frame.f_locals.get("group"))
            except (KeyError, ValueError):  # the group was destroyed
                return None
            return ForeignCollective(id(frame), code.co_name, tuple(ranks))
        frame = frame.f_back
    return None
