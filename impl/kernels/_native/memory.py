"""Where tensors lie: what `Tensor.data_ptr` says, asked of a thousand of them in microseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
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
        self._objects = id(self._tensors) + tuple.__basicsize__  # where CPython keeps the items of a tuple
        self.column = Column(bytes(Column.ITEM * len(self._tensors)))
        self.have_moved()

    def __reduce__(self) -> tuple[type[Addresses], tuple[tuple[Tensor, ...]]]:
        return Addresses, (self._tensors,)

    def have_moved(self) -> bool:
        """Whether one has other memory than when this was last asked; `column` says where they are now."""
        look = _look()
        found = -1 if look is None else look(len(self._tensors), self._objects, self.column.address)
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
    form: ListLayout

    @property
    def list(self) -> List:
        return List(self.addresses.address, self.form.code)


@dataclass(frozen=True)
class ListLayout:
    """What the library asks of tensors beside their addresses: it stays while dtype, shape and strides do."""

    numels: Column
    code: int  # of their dtype

    def at(self, tensors: Sequence[Tensor]) -> Tensors | None:
        """These tensors, which have this form; None where one has no memory."""
        addresses = _addresses_of(tensors)
        return None if addresses is None else Tensors(addresses, self)


class KnownLayoutList(list[Tensor]):
    """Plain tensors on one device, none empty, whose form is known: it was looked at, or guards say that it has stayed.

    It is for one operation or a few in succession, between which nothing moves: where they lie is looked up once.
    """

    def __init__(self, tensors: Iterable[Tensor], form: ListLayout) -> None:
        super().__init__(tensors)
        self.form = form

    @functools.cached_property
    def located(self) -> Tensors | None:
        """None where one has no memory."""
        return self.form.at(self)


def form_of(tensors: Sequence[Tensor]) -> ListLayout | None:
    """None if the library cannot take them: their dtypes differ or are others than its own, or they have gaps.

    Args:
        tensors: plain strided ones on one device; not empty.
    """
    if isinstance(tensors, KnownLayoutList):
        return tensors.form
    code = CODES.get(tensors[0].dtype)
    if code is None or len(dtypes_of(tensors)) > 1 or not _lie_plainly(tensors):
        return None
    return ListLayout(Column(map(Tensor.numel, tensors)), code)


def formed(tensors: Sequence[Tensor]) -> KnownLayoutList | None:
    """The tensors, with their form; None if the library cannot take them, as `form_of` says, or one is empty.

    Args:
        tensors: plain strided ones on one device; not empty.
    """
    form = form_of(tensors)
    return None if form is None or 0 in form.numels.numbers else KnownLayoutList(tensors, form)


def tensors_to_read(tensors: Sequence[Tensor]) -> Tensors | None:
    """None if the library cannot take them: `form_of` says why, or one has no memory."""
    if isinstance(tensors, KnownLayoutList):
        return tensors.located
    form = form_of(tensors)
    return None if form is None else form.at(tensors)


def joined(lists: Sequence[list[Tensor]]) -> list[Tensor]:
    """Return the lists joined. The layout is known if all are known, with one dtype and one device."""
    if len(lists) == 1:
        return lists[0]
    tensors = [*chain.from_iterable(lists)]
    known = [tensors for tensors in lists if isinstance(tensors, KnownLayoutList)]
    forms = [tensors.form for tensors in known]
    kinds = {(tensors.form.code, tensors[0].device) for tensors in known}
    if len(known) < len(lists) or len(kinds) != 1:
        return tensors
    return KnownLayoutList(
        tensors, ListLayout(Column(chain.from_iterable(form.numels.numbers for form in forms)), forms[0].code)
    )


def memory_of(tensors: Sequence[Tensor]) -> Column | None:
    """Addresses of tensors whose elements lie there without gaps, in whatever order of dimensions; else None."""
    return _addresses_of(tensors) if _lie_plainly(tensors) else None


def _lie_plainly(tensors: Sequence[Tensor]) -> bool:
    # A view may negate: its memory holds opposites.
    return are_dense(tensors) and not any(map(Tensor.is_neg, tensors))


def _addresses_of(tensors: Sequence[Tensor]) -> Column | None:
    addresses = Addresses(tensors).column
    if 0 in addresses.numbers and any(t.numel() and not t.data_ptr() for t in tensors):
        return None  # zeros without memory
    return addresses
