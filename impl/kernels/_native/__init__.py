"""CPU library in C: operations in one pass over memory, for which torch's operators take several.

It is built when the package is installed, if there is a compiler. Without it, torch's operators do the same. It uses
torch's threads: it runs in parallel regions of the OpenMP runtime that torch has loaded. Each operation has a C file
and a Python wrapper of the same name.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from impl.kernels.rules import FLAGS, INTERFACE, NUMBERS

# These constants are those of lists.h.
NATIVE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STATES = 3
# A thread takes a chunk of elements at a time. Chunks of long lists are longer, because memory is faster if it is read
# in long runs, but so many are left, for many threads and for some that are slower.
SHORT_CHUNK, _LONG_CHUNK = 1 << 14, 1 << 18
_CHUNKS = 128
# Up to this number of elements, more threads cost more than they save.
_FEW = 1 << 15


class List(Structure):
    """Addresses of tensors of one dtype. All fields are zero if the list is absent."""

    _fields_ = (("tensors", c_void_p), ("dtype", c_int64))


class Settings(Structure):
    """Settings of all rules for one parameter group. Each rule reads its own fields."""

    _fields_ = (
        ("rule", c_int64),
        *((name, c_double) for name in NUMBERS),
        *((name, c_int64) for name in FLAGS),
    )


class NativeUpdate(Structure):
    """Arguments of an update of a list of parameters."""

    _fields_ = (
        ("settings", Settings),
        ("factor", c_float),
        ("params", List),
        ("grads", List),
        ("states", List * STATES),
        ("low_precision_params", List),
        ("steps", c_void_p),
        ("before", List * (1 + STATES)),
        ("restores", c_int64),
        ("sums", c_void_p),
    )


@dataclass(frozen=True)
class NativeLibrary:
    """Functions of the library. `lists` returns the first five arguments of those that work on lists."""

    sum_of_squares: Callable[..., float]
    clamp: Callable[..., None]
    scale: Callable[..., None]
    fused_step: Callable[..., None]
    addresses: Callable[..., int]
    region: int | None  # address of `GOMP_parallel`, or None for one thread

    def lists(self, numels: Column, power: int | None = None) -> tuple[int | None, int, int, int, int]:
        few = self.region is None or numels.total <= _FEW
        threads = 1 if few else torch.get_num_threads()
        power = chunk_power(numels.total) if power is None else power
        return self.region, threads, power, len(numels.numbers), numels.address


def chunk_power(total: int) -> int:
    """Return the `power` for chunks of 2**power elements, in a list of `total` elements.

    It depends on the list alone, so that sums in the order of the chunks do not depend on the threads.
    """
    chunk = SHORT_CHUNK
    while chunk < _LONG_CHUNK and total // (2 * chunk) >= _CHUNKS:
        chunk *= 2
    return chunk.bit_length() - 1


def chunk_counts(numels: Iterable[int], power: int) -> list[int]:
    """Return the number of chunks of each tensor."""
    return [-(-numel >> power) for numel in numels]


# PYFUNCTYPE holds the GIL, because torch's function that it calls works on Python objects.
_addresses = ctypes.PYFUNCTYPE(c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p)


@functools.cache
def library() -> NativeLibrary | None:
    """Return the CPU library, or None if it was not built or cannot use torch's thread pool."""
    here = Path(__file__).parent
    built = next((path for end in EXTENSION_SUFFIXES if (path := here / f"_library{end}").exists()), None)
    if built is None:
        return None
    try:
        loaded = ctypes.CDLL(str(built))
        if loaded.tandem_interface() != INTERFACE:
            return None
    except (OSError, AttributeError):
        return None
    region = _parallel_region()
    if region is None and torch.get_num_threads() > 1:
        return None

    def function(name: str, result: Any, *arguments: Any) -> Any:
        typed = ctypes.CFUNCTYPE(result, c_void_p, c_int64, c_int64, c_int64, c_void_p, *arguments)
        return typed((f"tandem_{name}", loaded))

    return NativeLibrary(
        function("sum_of_squares", c_double, List, c_void_p, c_void_p, c_void_p),
        function("clamp", None, List, c_double, c_double),
        function("scale", None, List, c_float),
        function("fused_step", None, POINTER(NativeUpdate)),
        _addresses(("tandem_addresses", loaded)),
        region,
    )


def _parallel_region() -> int | None:
    """Return the address of the function that enters a parallel region, in torch's OpenMP runtime."""
    try:
        # The lookup includes the libraries that torch's own library is linked with.
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torchs.GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None


class Column:
    """Array of one number for each tensor, which the library reads."""

    ITEM = 8  # bytes

    def __init__(self, numbers: Iterable[int] | bytes) -> None:
        self.numbers = array("q", numbers)
        self.address = self.numbers.buffer_info()[0]

    @functools.cached_property
    def total(self) -> int:
        return sum(self.numbers)

    @functools.cached_property
    def chunk_counts(self) -> list[int]:
        """The number of chunks of each tensor, in an operation on the whole list."""
        return chunk_counts(self.numbers, chunk_power(self.total))
