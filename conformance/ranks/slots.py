"""CPU slots that test workers share, so that cases with many ranks take turns on few cores.

A slot is a name in the kernel's abstract socket namespace. Binding it fails while another process holds it, and the
kernel frees it when the holder ends in any way, so there is no lock file to clean up. Slots are not a lock: a process
that has waited `patience_s` continues without one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Generator, Sequence

_POLL_S = 0.002
# About half of all ranks wait for their peers or for their parent.
_RANKS_A_CORE = 2


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def cpu_slots(
    needed: int, family: str, *, capacity: int | None = None, patience_s: float = 5.0
) -> Generator[int]:
    """Context manager that holds `needed` slots of a family, or all if `capacity` (default: two per core) is smaller.

    It yields the number of slots that it holds, which is smaller only after waiting for `patience_s`.
    """
    capacity = capacity or _RANKS_A_CORE * cpu_count()
    end = time.monotonic() + patience_s
    with contextlib.ExitStack() as slots:
        # Only the holder of the gate collects slots, so that small cases do not overtake a large one forever.
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as gate:
            _bind_one(gate, [f"{family}-gate"], end)
            count = 0
            for _ in range(min(needed, capacity)):
                slot = slots.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
                count += _bind_one(slot, [f"{family}-{number}" for number in range(capacity)], end)
        yield count


def _bind_one(holder: socket.socket, names: Sequence[str], end: float) -> bool:
    """Bind to the first free name and return True, or return False if none is free until the time `end`."""
    while True:
        for name in names:
            with contextlib.suppress(OSError):
                holder.bind(f"\0tandem-{os.getuid()}-{name}")
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
