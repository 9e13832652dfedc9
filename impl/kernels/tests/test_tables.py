"""The tables with which kernels find their tensors: their contents, and how long they are cached."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impl.kernels import Parameters, TensorList, _update_table, list_layout
from impl.kernels._table import _KEY_BYTES, CHUNK, ChunkTable, KeptTables, chunk_table
from impl.kernels._update_table import known_update_table, update_table

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SIZES = st.sampled_from([0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1]) | st.integers(0, 3 * CHUNK)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(_SIZES, min_size=1, max_size=6), dtype=st.sampled_from((*_DTYPES, torch.float64)))
def test_chunks_cover_every_element_once(sizes: list[int], dtype: torch.dtype) -> None:
    tensors = [torch.empty(size, dtype=dtype) for size in sizes]
    table = chunk_table(TensorList(tensors))
    assert table is not None
    assert table.chunks == len(table.rows)
    width = tensors[0].element_size()
    covered = sorted((address, address + count * width) for address, count, _, _ in table.rows.tolist())
    expected = sorted(
        (tensor.data_ptr() + start * width, tensor.data_ptr() + min(start + CHUNK, tensor.numel()) * width)
        for tensor in tensors
        for start in range(0, tensor.numel(), CHUNK)
    )
    assert covered == expected
    assert table.dtype is dtype
    assert all(aligned == (address % 16 == 0) for address, _, _, aligned in table.rows.tolist())


def test_tensors_that_share_memory_take_no_table() -> None:
    buffer = torch.ones(100)
    assert chunk_table(TensorList([buffer[:60], buffer[40:]])) is None
    assert chunk_table(TensorList([buffer, buffer])) is None
    assert chunk_table(TensorList([buffer[::2]])) is None
    assert chunk_table(TensorList([buffer[:1].expand(5)])) is None
    assert chunk_table(TensorList([buffer[:50], buffer[50:]])) is not None


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(_SIZES, min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from(_DTYPES), min_size=2, max_size=5),
    moved=st.integers(0, 1),
)
def test_every_element_of_every_list_stands_in_one_row(
    sizes: list[int], dtypes: list[torch.dtype], moved: int
) -> None:
    lists = [[torch.empty(size + moved, dtype=dtype)[moved:] for size in sizes] for dtype in dtypes]
    steps = [torch.zeros(()) for _ in sizes]
    table = update_table(lists, steps)
    assert table is not None
    expected = []
    for place, size in enumerate(sizes):
        for start in range(0, size, CHUNK):
            count = min(CHUNK, size - start)
            addresses = [tensors[place][start:].data_ptr() for tensors in lists]
            aligned = all(address % 16 == 0 for address in addresses)
            expected.append([count, int(aligned), steps[place].data_ptr(), *addresses])
    assert (table.rows.tolist(), table.chunks) == (expected, len(expected))


def test_update_table_is_cached_while_addresses_stay() -> None:
    params, grads, other = [torch.zeros(5)], [torch.zeros(5)], [torch.zeros(5)]
    table = update_table([params, grads], [])
    assert update_table([params, grads], []) is table
    moved = update_table([params, other], [])
    assert moved is not None
    assert moved.rows.tolist() != table.rows.tolist()
    shorter = update_table([[params[0][:3]], [grads[0][:3]]], [])
    assert shorter is not None
    assert shorter.rows[0, 0] == 3


_BUFFER = torch.zeros(64)
_REFUSED: dict[str, list[list[Tensor]]] = {
    "a state in the parameter's memory": [[_BUFFER[:8]], [torch.zeros(8)], [_BUFFER[4:12]]],
    "a parameter in another's memory": [[_BUFFER[:8], _BUFFER[7:15]], [torch.zeros(8), torch.zeros(8)]],
    "gaps": [[_BUFFER[:16:2]], [torch.zeros(8)]],
    "another layout": [[torch.zeros(4, 3).t()], [torch.zeros(3, 4)]],
    "memory of other signs": [[torch.zeros(3)], [torch._neg_view(torch.ones(3))]],
    "no memory": [[torch.zeros(3)], [torch._efficientzerotensor((3,))]],
}


@pytest.mark.parametrize("lists", _REFUSED.values(), ids=_REFUSED.keys())
def test_unsupported_lists_have_no_table(lists: list[list[Tensor]]) -> None:
    assert update_table(lists, []) is None


def test_layouts_that_are_alike_are_taken() -> None:
    lists = [[torch.zeros(4, 3).t(), torch.zeros(2, 1, 5)], [torch.zeros(4, 3).t(), torch.zeros(2, 1, 5)]]
    assert update_table(lists, []) is not None


def test_chunk_table_is_cached_and_keeps_no_tensor_alive() -> None:
    tensors = [torch.ones(5), torch.ones(7)]
    alive = weakref.ref(tensors[0])
    table = chunk_table(TensorList(tensors))
    assert chunk_table(TensorList(tensors)) is table
    assert chunk_table(TensorList([*tensors, torch.ones(3)])) is not table
    del tensors
    assert alive() is None


class _Key(NamedTuple):
    number: int
    tensors: int = 1


@pytest.mark.parametrize("refused", [False, True])
def test_many_small_tables_are_kept_and_few_large_ones(refused: bool) -> None:
    built: list[int] = []

    def make(key: _Key) -> ChunkTable | None:
        built.append(key.number)
        return None if refused else ChunkTable(torch.zeros(1, 4, dtype=torch.int64), 1)

    small, large = (KeptTables(make, most_bytes=most) for most in (1 << 20, 3 * _KEY_BYTES + 16))
    for _ in range(2):
        for number in range(1000):
            small(_Key(number))
    assert built == [*range(1000)]
    built.clear()
    for number in (1, 2, 3, 1, 4, 1, 2):  # three fit where one is refused, else two
        large(_Key(number))
    assert built == ([1, 2, 3, 4, 2] if refused else [1, 2, 3, 1, 4, 2])


class _Known(NamedTuple):
    parameters: Parameters
    lists: list[list[Tensor]]

    def table_for(self, grads: list[Tensor]) -> ChunkTable | None:
        layout = list_layout(grads)
        assert layout is not None
        return known_update_table(self.parameters.memory, TensorList(grads, layout))


@pytest.fixture
def known() -> _Known:
    """Parameters, gradients, a state and copies, whose memory was looked at."""
    dtypes = (torch.float32, torch.float32, torch.float32, torch.bfloat16)
    lists = [[torch.zeros(size, dtype=dtype) for size in (5, CHUNK + 1)] for dtype in dtypes]
    parameters = Parameters(lists[0], [lists[2]], [torch.zeros(()), torch.zeros(())], lists[3])
    parameters.refresh_addresses()
    return _Known(parameters, lists)


def test_known_lists_have_the_same_table_and_are_not_queried(
    known: _Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = update_table(known.lists, known.parameters.steps)
    monkeypatch.setattr(_update_table, "_are_laid_out_alike", None)
    assert expected is not None
    assert known.table_for(known.lists[1]) is expected


@pytest.mark.parametrize("place", [0, 1, 2, 3, "steps"])
def test_known_lists_get_another_table_when_memory_moves(known: _Known, place: int | str) -> None:
    before = known.table_for(known.lists[1])
    moved = known.parameters.steps if place == "steps" else known.lists[int(place)]
    old = moved[1].data
    moved[1].data = old.clone()
    assert known.parameters.refresh_addresses() is (place != 1)
    after, expected = known.table_for(known.lists[1]), update_table(known.lists, known.parameters.steps)
    assert before is not None
    assert after is not None
    assert after is expected
    assert after.rows.tolist() != before.rows.tolist()


def test_known_gradients_without_memory_or_in_a_parameters_have_no_table(known: _Known) -> None:
    params, grads = known.lists[:2]
    assert known.table_for([torch._efficientzerotensor((5,)), grads[1]]) is None
    assert known.table_for([params[0].detach(), grads[1]]) is None
