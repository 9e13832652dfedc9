"""The CPU library: what torch's operators do in several passes over memory, done in one by code in C.

It is built when the package is installed, where there is a compiler for it, and used where it was built; without it
everything works, by torch's operators. Its threads are those of torch: it runs in parallel regions of the OpenMP
runtime that torch has loaded. One operation a file: the C code, and under the same name its wrapper in Python.
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

# As in lists.h.
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CHUNK = 1 << 14  # at least
STATES = 3
# Elements up to which other threads cost more than they help.
_FEW = 1 << 15


class List(Structure):
    """Addresses of tensors of one dtype; all zero: there is no such list."""

    _fields_ = (("tensors", c_void_p), ("dtype", c_int64))


class Settings(Structure):
    """A rule's, for one parameter group; a rule reads its own."""

    _fields_ = (
        ("rule", c_int64),
        *((name, c_double) for name in NUMBERS),
        *((name, c_int64) for name in FLAGS),
    )


class NativeUpdate(Structure):
    """One update of a list of parameters."""

    _fields_ = (
        ("settings", Settings),
        ("factor", c_float),
        ("params", List),
        ("grads", List),
        ("states", List * STATES),
        ("low_precision_params", List),
        ("steps", c_void_p),
    )


@dataclass(frozen=True)
class NativeLibrary:
    """The functions of the library; the first four arguments of those that walk lists are given by `lists`."""

    sum_of_squares: Callable[..., float]
    clamp: Callable[..., None]
    scale: Callable[..., None]
    fused_step: Callable[..., None]
    addresses: Callable[..., int]
    region: int | None  # address of `GOMP_parallel`; None: there is one thread

    def lists(self, numels: Column) -> tuple[int | None, int, int, int]:
        few = self.region is None or numels.total <= _FEW
        return self.region, 1 if few else torch.get_num_threads(), len(numels.numbers), numels.address


# With Python's lock held: torch's function that it calls is for Python objects.
_addresses = ctypes.PYFUNCTYPE(c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p)


@functools.cache
def library() -> NativeLibrary | None:
    """None where it was not built, or would have one thread where torch has several when this is first asked."""
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
        typed = ctypes.CFUNCTYPE(result, c_void_p, c_int64, c_int64, c_void_p, *arguments)
        return typed((f"tandem_{name}", loaded))

    return NativeLibrary(
        function("sum_of_squares", c_double, List, c_void_p),
        function("clamp", None, List, c_double, c_double),
        function("scale", None, List, c_float),
        function("fused_step", None, POINTER(NativeUpdate)),
        _addresses(("tandem_addresses", loaded)),
        region,
    )


def _parallel_region() -> int | None:
    """Address of the function by which compiled code enters a parallel region, in torch's OpenMP runtime."""
    try:
        # Looked up in what torch's own library is linked with.
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torchs.GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None


class Column:
    """Numbers, one a tensor, where the library reads them."""

    ITEM = 8  # bytes

    def __init__(self, numbers: Iterable[int] | bytes) -> None:
        self.numbers = array("q", numbers)
        self.address = self.numbers.buffer_info()[0]

    @functools.cached_property
    def total(self) -> int:
        return sum(self.numbers)
