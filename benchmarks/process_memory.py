"""What Linux says of the memory that this process takes; what the allocator has kept for later is given back first."""

import ctypes
import gc
from pathlib import Path
from typing import Any

_PEAK = Path("/proc/self/clear_refs")


def give_back_at_once() -> None:
    """From here on whatever is freed of what is large goes back to the system, so that the peak is what is in use."""
    of_mmap_threshold = -3  # M_MMAP_THRESHOLD of <malloc.h>
    ctypes.CDLL(None).mallopt(of_mmap_threshold, 1 << 16)


def resident_bytes() -> int:
    return _reported("VmRSS")


def forget_peak() -> None:
    """Have the peak begin anew."""
    gc.collect()
    _PEAK.write_text("5")


def peak_bytes() -> int:
    return _reported("VmHWM")


def asked_of_new_ranks(case: str, world_size: int, **given: Any) -> int:
    """What the first of `world_size` ranks that have had no other model answers to `module:function`."""
    from conformance.ranks import RankPool  # noqa: PLC0415 (brings what only the judge needs)

    if not _PEAK.exists():
        raise NotImplementedError("asks Linux")
    with RankPool(world_size) as pool:
        return pool.run(case, deadline_s=300, **given)[0]


def _reported(what: str) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(what)]
    return int(line.split()[1]) * 1024
