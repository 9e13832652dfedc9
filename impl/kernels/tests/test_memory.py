"""Where tensors lie: as `data_ptr` says, whatever the tensors are, and noticed when it changes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from operator import is_

import pytest
import torch
from torch import Tensor
from torch.utils import swap_tensors

from impl.kernels import Addresses, KnownLayoutList, concat, with_layout
from impl.kernels._native import CODES, memory
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


def test_they_are_what_data_ptr_says(way: str) -> None:
    for some in (tensors(), [], tensors()[:1], [torch.zeros(2).as_subclass(Subclass), *tensors()]):
        addresses = Addresses(some)
        assert list(addresses.column.numbers) == [t.data_ptr() for t in some]
        assert not addresses.changed_address()


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
def test_one_that_moves_is_noticed_once(way: str, change: str, place: int, last: type[Tensor]) -> None:
    some = [*(torch.zeros(5) for _ in range(20)), torch.zeros(5).as_subclass(last)]
    addresses = Addresses(some)
    CHANGES[change](some[place])
    assert addresses.changed_address()
    assert list(addresses.column.numbers) == [t.data_ptr() for t in some]
    assert not addresses.changed_address()


def test_the_tensors_are_kept_and_the_list_may_change(way: str) -> None:
    some = [torch.zeros(5) for _ in range(20)]
    expected = [t.data_ptr() for t in some]
    addresses = Addresses(some)
    some.clear()
    gc.collect()
    torch.ones(1000)
    assert not addresses.changed_address()
    assert list(addresses.column.numbers) == expected


def test_a_copy_is_about_the_copied_tensors(way: str) -> None:
    some = [torch.zeros(5) for _ in range(3)]
    pair = copy.deepcopy([some, Addresses(some)])
    del some
    gc.collect()
    assert list(pair[1].column.numbers) == [t.data_ptr() for t in pair[0]]
    assert not pair[1].changed_address()


def test_what_is_known_of_lists_is_known_of_all_together() -> None:
    some, others = [torch.zeros(3), torch.zeros(2, 3)], [torch.zeros(4)]
    whole = concat([known(some), known(others)])
    assert isinstance(whole, KnownLayoutList)
    assert all(map(is_, whole, [*some, *others]))
    assert list(whole.form.numels.numbers) == [3, 6, 4]
    assert whole.form.code == CODES[torch.float32]


@pytest.mark.parametrize(
    "other", [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(4, device="meta")]
)
def test_what_is_not_known_of_one_list_is_not_known_of_all(other: Tensor) -> None:
    """Lists of another dtype or device, or with an unknown layout."""
    some = [torch.zeros(3)]
    whole = concat(
        [known(some), known([other]) if other.dtype is torch.bfloat16 or other.is_meta else [other]]
    )
    assert not isinstance(whole, KnownLayoutList)
    assert all(map(is_, whole, [*some, other]))


def known(tensors: list[Tensor]) -> list[Tensor]:
    found = with_layout(tensors)
    assert found is not None
    return found
