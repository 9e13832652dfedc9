"""What Linux says of the memory that this process takes; what the allocator has kept for later is given back first."""

import ctypes
import gc
from pathlib import Path


def give_back_at_once() -> None:
    """From here on whatever is freed of what is large goes back to the system, so that the peak is what is in use."""
    of_mmap_threshold = -3  # M_MMAP_THRESHOLD of <malloc.h>
    ctypes.CDLL(None).mallopt(of_mmap_threshold, 1 << 16)


def resident_bytes() -> int:
    return _said("VmRSS")


def forget_peak() -> None:
    """Have the peak begin anew."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    return _said("VmHWM")


def _said(what: str) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(what)]
    return int(line.split()[1]) * 1024
