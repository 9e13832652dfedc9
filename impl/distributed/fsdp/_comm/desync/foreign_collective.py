"""In which collective of torch.distributed, that a user has called, a thread of this process waits.

Nothing is told of collectives that are not ours. What they wait in can be seen: the functions on the thread's stack.
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

# Those that no rank leaves before all ranks have come to them, and that do nothing else: that of objects
# still unpickles when the others have gone on, and where it waits it has called one of these.
_MEETINGS = frozenset(
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
    frame: int  # which call it is
    name: str
    ranks: tuple[int, ...]  # that it waits for, by their numbers in the default group


_one_at_a_time = threading.Lock()
# No child is left with it taken and without garbage collection.
os.register_at_fork(
    before=_one_at_a_time.acquire,
    after_in_parent=_one_at_a_time.release,
    after_in_child=_one_at_a_time.release,
)


@contextlib.contextmanager
def _no_garbage_collection() -> Generator[None]:
    if sys.version_info >= (3, 12):  # which collects between two instructions of Python alone
        yield
        return
    with _one_at_a_time:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


@_no_garbage_collection()
def foreign_collective(thread: int) -> ForeignCollective | None:
    """The innermost one that a thread is in; only if two looks find the same does it wait there.

    In Python 3.11 no garbage is collected meanwhile: it may collect while it makes the object for the frame below, a
    finalizer (a tensor's, say) lets the other thread run, and the frame is gone when its object is filled in.
    """
    frame: Any = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == distributed_c10d.__file__ and code.co_name in _MEETINGS:
            try:
                ranks = dist.get_process_group_ranks(frame.f_locals.get("group"))
            except (KeyError, ValueError):  # of a group that is no more
                return None
            return ForeignCollective(id(frame), code.co_name, tuple(ranks))
        frame = frame.f_back
    return None
