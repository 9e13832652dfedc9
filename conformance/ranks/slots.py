"""CPU slots that all pools of a user share, so that wide cases of parallel test workers take turns on few cores.

A slot is a name in the kernel's abstract socket namespace: binding it fails while somebody else holds it, and the
kernel frees it when the holder ends, however it ends. There is no file to lock, to own or to forget.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Generator

_POLL_S = 0.002


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def cpu_slots(wanted: int, capacity: int | None = None, family: str = "cpu") -> Generator[None]:
    """Hold `wanted` slots of `capacity` (default: one a core); who wants more than there are gets them all."""
    capacity = capacity or cpu_count()
    with contextlib.ExitStack() as held:
        # Whoever stands at the gate collects slots as they fall free, so that a wide case is never starved by narrow
        # ones that slip past it.
        with contextlib.closing(_bound([f"{family}-gate"])):
            for _ in range(min(wanted, capacity)):
                held.enter_context(
                    contextlib.closing(_bound([f"{family}-{slot}" for slot in range(capacity)]))
                )
        yield


def _bound(names: list[str]) -> socket.socket:
    """A socket that holds the first of `names` to be free."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        while True:
            for name in names:
                with contextlib.suppress(OSError):
                    holder.bind(f"\0tandem-{os.getuid()}-{name}")
                    return holder
            time.sleep(_POLL_S)
    except BaseException:
        holder.close()
        raise
