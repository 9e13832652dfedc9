"""Fast lookup of tensor addresses: `data_ptr()` of a thousand tensors in microseconds.

`Addresses` reads the memory of CPython objects, which is why it checks the size of an object and the type of each
tensor first. With torch 2.13 on an AMD EPYC core, 150 and 1,000 tensors take, in microseconds:

| | 150 | 1,000 |
|---|---|---|
| `Addresses(tensors)` | 4.5 | 15 |
| `addresses.refresh()` | 2.6 | 10 |
| `[tensor.data_ptr() for tensor in tensors]` | 15 | 93 |

That is the fastest of 3,000 calls of each, timed in turn by `time.perf_counter`. A `clip_grad_norm_` of 150 small
tensors takes 146, and a fused step of AdamW looks up four times as many addresses as it has parameters. torch's stable
C interface offers no alternative: it takes tensor handles, which only C++ gets from Python objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards  # does not import Dynamo

from impl.kernels._lists import PLAIN_TYPES, are_on, dtypes_of, has_nested
from impl.kernels._native import NATIVE_CODES, Column, List, library
from impl.kernels._storage_order import are_dense

# Size of a CPython object that begins like the C code expects: with a reference count, then its type.
_PLAIN_OBJECT_BYTES = 16
_Lookup = Callable[[int, int, int], int]


class Addresses:
    """Addresses of tensors, which it keeps alive. Checking them again is cheap.

    Args:
        tensors: tensors with a storage, like dense ones, because torch's function cannot raise when called from C.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._objects = id(self._tensors) + tuple.__basicsize__  # address of the tuple's items
        self.column = Column(bytes(Column.ITEM * len(self._tensors)))
        self.refresh()

    def __reduce__(self) -> tuple[type[Addresses], tuple[tuple[Tensor, ...]]]:
        return Addresses, (self._tensors,)

    def refresh(self) -> bool:
        """Update `column`. Return whether an address has changed since the last call."""
        look_up = _native_lookup()
        result = -1 if look_up is None else look_up(len(self._tensors), self._objects, self.column.address)
        if result >= 0:
            return bool(result)
        previous, self.column = self.column, Column(map(Tensor.data_ptr, self._tensors))
        return previous.numbers != self.column.numbers


@functools.cache
def _native_lookup() -> _Lookup | None:
    """Return the library's function, or None without the library, torch's function or the expected object layout."""
    loaded = library()
    torchs = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)
    if loaded is None or torchs is None or object.__basicsize__ != _PLAIN_OBJECT_BYTES:
        return None
    return functools.partial(loaded.addresses, torchs, *map(id, PLAIN_TYPES))


class Tensors(NamedTuple):
    """A list of tensors for the library. It keeps the columns alive."""

    addresses: Column
    layout: ListLayout

    @property
    def list(self) -> List:
        return List(self.addresses.address, self.layout.code)


@dataclass(frozen=True)
class ListLayout:
    """Sizes and dtype of a list of tensors, which stay valid while dtype, shapes and strides do."""

    numels: Column
    code: int  # code of the dtype

    def at(self, tensors: Sequence[Tensor]) -> Tensors | None:
        """Return `tensors`, which have this layout, with their addresses, or None if one has no memory."""
        addresses = _addresses_of(tensors)
        return None if addresses is None else Tensors(addresses, self)


@dataclass(frozen=True, eq=False)
class TensorList:
    """Tensors for one operation, or a few in succession that move none, because addresses are only looked up once.

    Args:
        tensors: dense tensors on one device, unless `by_device` is to split them.
        layout: layout of plain non-empty tensors, which was queried or confirmed by guards. None: not uniform, or not
            known.
    """

    tensors: Sequence[Tensor]
    layout: ListLayout | None = None

    @functools.cached_property
    def memory(self) -> Tensors | None:
        """Tensors for the library, or None if it does not support them or one has no memory."""
        layout = _query_layout(self.tensors) if self.layout is None else self.layout
        return None if layout is None else layout.at(self.tensors)

    @property
    def representatives(self) -> Sequence[Tensor]:
        """The first tensor if the layout is known, which makes the list uniform, else all tensors."""
        return self.tensors if self.layout is None else self.tensors[:1]

    def by_device(self) -> dict[torch.device, TensorList]:
        """Split a list whose tensors may be on several devices, in order of first appearance."""
        if self.tensors and (self.layout is not None or are_on(self.tensors[0].device, self.tensors)):
            return {self.tensors[0].device: self}
        batches: dict[torch.device, list[Tensor]] = {}
        for tensor in self.tensors:
            batches.setdefault(tensor.device, []).append(tensor)
        return {device: TensorList(batch) for device, batch in batches.items()}


def list_layout(tensors: Sequence[Tensor]) -> ListLayout | None:
    """Return the layout of a list, or None if it is not uniform: the library does not support it, or a tensor is empty.

    Args:
        tensors: a non-empty list of plain strided tensors on one device.
    """
    layout = _query_layout(tensors)
    return None if layout is None or 0 in layout.numels.numbers else layout


def _query_layout(tensors: Sequence[Tensor]) -> ListLayout | None:
    code = NATIVE_CODES.get(tensors[0].dtype)
    if code is None or len(dtypes_of(tensors)) > 1 or has_nested(tensors) or not _are_dense(tensors):
        return None
    return ListLayout(Column(map(Tensor.numel, tensors)), code)


def concat(lists: Sequence[TensorList]) -> TensorList:
    """Concatenate lists. The layout is known if those of all lists are, with one dtype and one device."""
    if len(lists) == 1:
        return lists[0]
    tensors = [*chain.from_iterable(entry.tensors for entry in lists)]
    known = [(entry.layout, entry.tensors[0].device) for entry in lists if entry.layout is not None]
    if len(known) < len(lists) or len({(layout.code, device) for layout, device in known}) != 1:
        return TensorList(tensors)
    numels = chain.from_iterable(layout.numels.numbers for layout, _ in known)
    return TensorList(tensors, ListLayout(Column(numels), known[0][0].code))


def memory_of(tensors: Sequence[Tensor]) -> Column | None:
    """Return the addresses of tensors, or None if one is not dense, in any order of dimensions."""
    return _addresses_of(tensors) if _are_dense(tensors) else None


def _are_dense(tensors: Sequence[Tensor]) -> bool:
    # The memory of a view with a negative bit holds negated values.
    return are_dense(tensors) and not any(map(Tensor.is_neg, tensors))


def _addresses_of(tensors: Sequence[Tensor]) -> Column | None:
    addresses = Addresses(tensors).column
    if 0 in addresses.numbers and any(t.numel() and not t.data_ptr() for t in tensors):
        return None  # a zero tensor without memory
    return addresses
