"""The CPU library: what torch's operators do in several passes over memory, done in one by code in C.

It is built when the package is installed, where there is a compiler for it, and used where it was built; without it
everything works, by torch's operators. Its threads are those of torch: it runs in parallel regions of the OpenMP
runtime that torch has loaded. One operation a file: the C code, and under the same name its door in Python.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impl.kernels._lists import dtypes_of
from impl.kernels._storage_order import are_dense
from impl.kernels._table import lie_apart, on_host

# As `tandem_interface` gives it: changed together with the arguments and structures of the C code.
_INTERFACE = 2
# As in lists.h.
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CHUNK = 1 << 14
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
        *((name, c_double) for name in ("lr", "weight_decay", "eps", "beta1", "beta2")),
        *((name, c_double) for name in ("momentum", "dampening", "lr_decay")),
        *((name, c_int64) for name in ("maximize", "decoupled", "nesterov", "first")),
    )


class Update(Structure):
    """One update of a list of parameters."""

    _fields_ = (
        ("settings", Settings),
        ("factor", c_float),
        ("params", List),
        ("grads", List),
        ("states", List * STATES),
        ("copies", List),
        ("steps", c_void_p),
    )


@dataclass(frozen=True)
class Library:
    """The functions of the library; their first four arguments are given by `lists`."""

    sum_of_squares: Callable[..., float]
    scale: Callable[..., None]
    fused_step: Callable[..., None]
    region: int | None  # address of `GOMP_parallel`; None: there is one thread

    def lists(self, numels: Column) -> tuple[int | None, int, int, int]:
        few = self.region is None or numels.total <= _FEW
        return self.region, 1 if few else torch.get_num_threads(), len(numels.numbers), numels.address


@functools.cache
def library() -> Library | None:
    """None where it was not built, or would have one thread where torch has several when this is first asked."""
    here = Path(__file__).parent
    built = next((path for end in EXTENSION_SUFFIXES if (path := here / f"_library{end}").exists()), None)
    if built is None:
        return None
    try:
        loaded = ctypes.CDLL(str(built))
        if loaded.tandem_interface() != _INTERFACE:
            return None
    except (OSError, AttributeError):
        return None
    region = _parallel_region()
    if region is None and torch.get_num_threads() > 1:
        return None

    def function(name: str, result: Any, *arguments: Any) -> Any:
        typed = ctypes.CFUNCTYPE(result, c_void_p, c_int64, c_int64, c_void_p, *arguments)
        return typed((f"tandem_{name}", loaded))

    return Library(
        function("sum_of_squares", c_double, List, c_void_p),
        function("scale", None, List, c_float),
        function("fused_step", None, POINTER(Update)),
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

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = array("q", numbers)
        self.address = self.numbers.buffer_info()[0]

    @functools.cached_property
    def total(self) -> int:
        return sum(self.numbers)


class Tensors(NamedTuple):
    """A list of tensors as the library takes it; columns live as long as this does."""

    addresses: Column
    numels: Column
    code: int

    @property
    def list(self) -> List:
        return List(self.addresses.address, self.code)


def tensors_to_read(tensors: Sequence[Tensor]) -> Tensors | None:
    """None if the library cannot take them: their dtypes differ or are others than its own, or they have gaps."""
    code = CODES.get(tensors[0].dtype)
    if code is None or len(dtypes_of(tensors)) > 1 or (addresses := memory_of(tensors)) is None:
        return None
    return Tensors(Column(addresses), Column(list(map(Tensor.numel, tensors))), code)


def tensors_to_write(tensors: Sequence[Tensor]) -> Tensors | None:
    """None also if two share memory: threads take them in any order."""
    found = tensors_to_read(tensors)
    if found is None:
        return None
    addresses, numels = (tuple(column.numbers) for column in (found.addresses, found.numels))
    return found if _lie_apart(addresses, numels, tensors[0].itemsize) else None


@functools.lru_cache(maxsize=64)
def _lie_apart(addresses: tuple[int, ...], numels: tuple[int, ...], itemsize: int) -> bool:
    starts = on_host(addresses)
    return lie_apart(starts, starts + on_host(numels) * itemsize)


def memory_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """Addresses of tensors whose elements lie there without gaps, in whatever order of dimensions; else None."""
    if not are_dense(tensors) or any(
        map(Tensor.is_neg, tensors)
    ):  # a view that negates: memory holds opposites
        return None
    addresses = list(map(Tensor.data_ptr, tensors))
    if not all(addresses) and any(t.numel() and not t.data_ptr() for t in tensors):  # zeros without memory
        return None
    return addresses
