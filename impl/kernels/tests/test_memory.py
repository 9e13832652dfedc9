"""`Addresses` equals `data_ptr()` for all types of tensors and notices changes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from operator import is_

import pytest
import torch
from torch import Tensor
from torch.utils import swap_tensors

from impl.kernels import Addresses, TensorList, concat, list_layout
from impl.kernels._native import NATIVE_CODES, memory
from impl.kernels.tests.native import the_library


class Subclass(Tensor):
    """Not one that the library asks in C."""


@pytest.fixture(params=["by the library", "by Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "by Python":
        monkeypatch.setattr(memory, "library", lambda: None)
    else:
        the_library()
    memory._native_lookup.cache_clear()
    yield request.param
    memory._native_lookup.cache_clear()


def tensors() -> list[Tensor]:
    whole = torch.arange(40.0)
    return [
        whole,
        whole[7:9],
        torch.nn.Parameter(torch.zeros(3)),
        torch.zeros(0),
        torch.zeros(2, 3, dtype=torch.float16).t(),
        torch.zeros(3, device="meta"),
        torch._efficientzerotensor(3),
        *(torch.zeros(1) for _ in range(20)),
    ]


def test_addresses_equal_data_ptr(way: str) -> None:
    for listed in (tensors(), [], tensors()[:1], [torch.zeros(2).as_subclass(Subclass), *tensors()]):
        addresses = Addresses(listed)
        assert list(addresses.column.numbers) == [t.data_ptr() for t in listed]
        assert not addresses.refresh()


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda t: setattr(t, "data", torch.ones(5)),
    "set_": lambda t: t.set_(torch.ones(5)),
    "a view of the same": lambda t: setattr(t, "data", t.data[1:]),
    "freed": lambda t: t.untyped_storage().resize_(0),
    "swapped": lambda t: swap_tensors(t, torch.ones(5)),
    "swapped for another class": lambda t: swap_tensors(t, torch.ones(5).as_subclass(Subclass)),
}


@pytest.mark.parametrize("place", [0, 8, 19])
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("last", [Tensor, Subclass])
def test_moved_tensor_is_reported_once(way: str, change: str, place: int, last: type[Tensor]) -> None:
    listed = [*(torch.zeros(5) for _ in range(20)), torch.zeros(5).as_subclass(last)]
    addresses = Addresses(listed)
    CHANGES[change](listed[place])
    assert addresses.refresh()
    assert list(addresses.column.numbers) == [t.data_ptr() for t in listed]
    assert not addresses.refresh()


def test_addresses_keep_tensors_alive_and_ignore_list_changes(way: str) -> None:
    listed = [torch.zeros(5) for _ in range(20)]
    expected = [t.data_ptr() for t in listed]
    addresses = Addresses(listed)
    listed.clear()
    gc.collect()
    torch.ones(1000)
    assert not addresses.refresh()
    assert list(addresses.column.numbers) == expected


def test_deepcopy_has_addresses_of_copied_tensors(way: str) -> None:
    listed = [torch.zeros(5) for _ in range(3)]
    pair = copy.deepcopy([listed, Addresses(listed)])
    del listed
    gc.collect()
    assert list(pair[1].column.numbers) == [t.data_ptr() for t in pair[0]]
    assert not pair[1].refresh()


def test_concat_of_matching_layouts_keeps_layout() -> None:
    first, second = [torch.zeros(3), torch.zeros(2, 3)], [torch.zeros(4)]
    whole = concat([known(first), known(second)])
    assert whole.layout is not None
    assert all(map(is_, whole.tensors, [*first, *second]))
    assert list(whole.layout.numels.numbers) == [3, 6, 4]
    assert whole.layout.code == NATIVE_CODES[torch.float32]


@pytest.mark.parametrize(
    "other", [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(4, device="meta")]
)
def test_concat_of_other_layouts_has_no_layout(other: Tensor) -> None:
    """Lists of another dtype or device, or with an unknown layout."""
    listed = [torch.zeros(3)]
    is_known = other.dtype is torch.bfloat16 or other.is_meta
    whole = concat([known(listed), known([other]) if is_known else TensorList([other])])
    assert whole.layout is None
    assert all(map(is_, whole.tensors, [*listed, other]))


def known(tensors: list[Tensor]) -> TensorList:
    layout = list_layout(tensors)
    assert layout is not None
    return TensorList(tensors, layout)
