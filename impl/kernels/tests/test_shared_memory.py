"""Tensors that share memory are changed one after the other, and no two programs of a launch write the same element."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.kernels import TensorList
from impl.kernels._by_dtype import may_share_memory
from impl.kernels._table import CHUNK, chunk_table
from impl.kernels._update_table import ADDRESSES, COUNT, update_table
from impl.kernels.tests.interpreter import the_interpreter
from impl.kernels.tests.racing import Range, changed, race, stepped, views_of

_NUMEL = 3 * CHUNK
_BOUNDS = st.sampled_from([0, 1, 4, 5, CHUNK - 1, CHUNK, CHUNK + 1, _NUMEL]) | st.integers(0, _NUMEL)
_RANGES = st.tuples(_BOUNDS, _BOUNDS).map(lambda bounds: (min(bounds), max(bounds)))
_DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
few = settings(max_examples=12, deadline=None)
many = settings(max_examples=60, deadline=None)


def overlap(ranges: list[Range]) -> bool:
    return any(
        max(first[0], second[0]) < min(first[1], second[1])
        for first, second in itertools.combinations(ranges, 2)
    )


def test_emulated_race_changes_an_element_once() -> None:
    _, views = views_of(4, [(0, 4), (0, 4), (2, 4)])
    with race():
        torch._foreach_mul_(views, 0.5)
    assert views[0].tolist() == [32.0] * 4


@pytest.mark.parametrize(
    ("backend", "operation"),
    [("torch", "scale_"), ("torch", "clip_")]
    + [("triton", operation) for operation in ("scale_", "clip_", "unscale_", "unscale_by_")],
)
@few
@given(ranges=st.lists(_RANGES, min_size=2, max_size=4))
def test_views_of_one_buffer_are_changed_in_turn(backend: str, operation: str, ranges: list[Range]) -> None:
    """Scale by 0.5 for each view that holds an element.

    torch's operator unscales one tensor after the other on the CPU, so that only what Triton leaves to it may race.
    """
    arguments = backend, operation, _NUMEL, ranges
    actual = changed(*arguments) if backend == "torch" else the_interpreter().call(changed, *arguments)
    expected, views = views_of(_NUMEL, ranges)
    for view in views:
        view.mul_(0.5)
    assert actual == expected.tolist()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        ("none", ([-1.0, -2.0, -4.0], [32.5, 33.0, 34.0], [-1.0, -2.0, -4.0])),
        ("params", ([-135.0] * 3, [32.5, 33.0, 34.0], [-1.0, -67.0, -135.0])),
        ("momenta", ([-1.0, 29.5, 42.75], [10.625] * 3, [-1.0, 29.5, 42.75])),
        ("copies", ([-1.0, -2.0, -4.0], [32.5, 33.0, 34.0], [-4.0] * 3)),
        ("all", ([-56.75] * 3, [10.625] * 3, [-56.75] * 3)),
    ],
)
def test_parameters_that_share_memory_are_updated_in_turn(
    backend: str, shared: str, expected: tuple[list[float], ...]
) -> None:
    actual = (
        stepped(backend, shared) if backend == "torch" else the_interpreter().call(stepped, backend, shared)
    )
    assert actual == expected


@many
@given(ranges=st.lists(_RANGES, min_size=1, max_size=4), dtype=_DTYPES)
def test_programs_of_a_launch_write_different_elements(ranges: list[Range], dtype: torch.dtype) -> None:
    """A list with overlapping ranges has no table, because the programs of a launch have no order."""
    _, views = views_of(_NUMEL, ranges, dtype)
    table = chunk_table(TensorList(views))
    assert (table is None) is may_share_memory(views) is overlap(ranges)
    if table is not None:
        rows = table.rows.tolist()
        assert not overlap([(address, address + count * dtype.itemsize) for address, count, *_ in rows])


@many
@given(ranges=st.lists(_RANGES, min_size=2, max_size=4), written=st.integers(1, 2))
def test_programs_of_an_update_write_different_elements(ranges: list[Range], written: int) -> None:
    """The lists are parameters, gradients and momenta. One of them, which is written, consists of views of a buffer."""
    _, views = views_of(_NUMEL, ranges)
    lists = [views, *([torch.empty_like(view) for view in views] for _ in range(2))]
    lists = [lists[1], lists[2], views] if written == 2 else lists
    table = update_table(lists, [])
    assert (table is None) is overlap(ranges)
    if table is not None:
        rows = table.rows.tolist()
        assert not overlap(
            [
                (start, start + 4 * row[COUNT])
                for row in rows
                for start in (row[ADDRESSES], row[ADDRESSES + 2])
            ]
        )


def test_interleaved_views_count_as_shared() -> None:
    """Views whose ranges overlap are changed in turn, even if their elements do not overlap."""
    buffer = torch.ones(8)
    assert may_share_memory([buffer[::2], buffer[1::2]])
    assert not may_share_memory([buffer[:4:2], buffer[4::2]])
    assert not may_share_memory([buffer[:0], buffer[:0], buffer, *[torch._efficientzerotensor((3,))] * 2])
