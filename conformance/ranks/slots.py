"""CPU slots that test workers share, so that their wide cases take turns on few cores.

A slot is a name in the kernel's abstract socket namespace: binding it fails while somebody else holds it, and the
kernel frees it when the holder ends, however it ends. There is no file to lock, to own or to forget. Taking turns is
a courtesy and no lock: who has waited `patience_s` goes ahead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Generator, Sequence

_POLL_S = 0.002
_RANKS_A_CORE = 2  # one rank in two waits: for its peers, or for its parent


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def cpu_slots(
    needed: int, family: str, *, capacity: int | None = None, patience_s: float = 5.0
) -> Generator[int]:
    """Hold `needed` of the family's `capacity` slots (default: two a core), all of them if they are fewer.

    Yields how many are held, which is less only when patience has run out.
    """
    capacity = capacity or _RANKS_A_CORE * cpu_count()
    end = time.monotonic() + patience_s
    with contextlib.ExitStack() as held:
        # Whoever stands at the gate collects slots as they fall free, so that a wide case is never starved by narrow
        # ones that slip past it.
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as gate:
            _bind_one(gate, [f"{family}-gate"], end)
            count = 0
            for _ in range(min(needed, capacity)):
                slot = held.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
                count += _bind_one(slot, [f"{family}-{number}" for number in range(capacity)], end)
        yield count


def _bind_one(holder: socket.socket, names: Sequence[str], end: float) -> bool:
    """Bind to the first of `names` to be free; whether one was, by the time `end`."""
    while True:
        for name in names:
            with contextlib.suppress(OSError):
                holder.bind(f"\0tandem-{os.getuid()}-{name}")
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
