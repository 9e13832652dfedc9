"""Where tensors lie: what `Tensor.data_ptr` says, asked of a thousand of them in microseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch._C._dynamo import guards  # does not import Dynamo

from impl.kernels._lists import PLAIN_TYPES, dtypes_of
from impl.kernels._native import CODES, Column, List, library
from impl.kernels._storage_order import are_dense

# Of an object of CPython that begins as the C code takes it to: with a count of references, then its type.
_PLAIN_OBJECT_BYTES = 16
_Look = Callable[[int, int, int], int]


class Addresses:
    """Of the memory of some tensors, which are kept alive. To look again costs little.

    Args:
        tensors: ones that have a storage, as dense ones do: torch's function, called from C, cannot raise.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._objects = Column(map(id, self._tensors))
        self.column = Column([0] * len(self._tensors))
        self.have_moved()

    def __reduce__(self) -> tuple[type[Addresses], tuple[tuple[Tensor, ...]]]:
        return Addresses, (self._tensors,)

    def have_moved(self) -> bool:
        """Whether one has other memory than when this was last asked; `column` says where they are now."""
        look = _look()
        found = -1 if look is None else look(len(self._tensors), self._objects.address, self.column.address)
        if found >= 0:
            return bool(found)
        before, self.column = self.column, Column(map(Tensor.data_ptr, self._tensors))
        return before.numbers != self.column.numbers


@functools.cache
def _look() -> _Look | None:
    """None where the library is not there, or torch's function, or Python's objects are laid out otherwise."""
    found = library()
    torchs = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)
    if found is None or torchs is None or object.__basicsize__ != _PLAIN_OBJECT_BYTES:
        return None
    return functools.partial(found.addresses, torchs, *map(id, PLAIN_TYPES))


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
    return Tensors(addresses, Column(map(Tensor.numel, tensors)), code)


def memory_of(tensors: Sequence[Tensor]) -> Column | None:
    """Addresses of tensors whose elements lie there without gaps, in whatever order of dimensions; else None."""
    if not are_dense(tensors) or any(map(Tensor.is_neg, tensors)):
        return None  # there are gaps; or a view negates, whose memory holds opposites
    addresses = Addresses(tensors).column
    if 0 in addresses.numbers and any(t.numel() and not t.data_ptr() for t in tensors):
        return None  # zeros without memory
    return addresses
