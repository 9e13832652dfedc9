"""Conversion of impl's shards to rows of ShardedTensor and DTensor, and back, without loss or double sends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.ranks import Rank, RankPool
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.flat_slots import FlatLayout, Slot, layout_of
from impl.distributed.fsdp._state_dict import redistribution
from impl.distributed.fsdp._state_dict.redistribution import chunk_of, overlaps

pytestmark = pytest.mark.deadline(120)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


def stride_of(shape: tuple[int, ...], outward: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a dense tensor. `outward` lists its dimensions from the innermost one in memory."""
    stride, step = [0] * len(shape), 1
    for dim in outward:
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)


@st.composite
def layouts(draw: st.DrawFn, world: int | None = None) -> FlatLayout:
    named = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        outward = draw(st.permutations(range(len(shape))))
        named.append((f"p{number}", shape, stride_of(shape, tuple(outward))))
    return layout_of(named, world or draw(st.integers(1, 5)), draw(st.sampled_from([1, 4])))


def full_tensor_of(slot: Slot, values: torch.Tensor) -> torch.Tensor:
    return values.as_strided(slot.shape, slot.stride)


@given(layout=layouts())
def test_overlaps_are_what_chunks_are_made_of(layout: FlatLayout) -> None:
    ranks = range(layout.world)
    for slot in layout.slots:
        values = torch.arange(slot.numel)
        expected = full_tensor_of(slot, values).chunk(layout.world)
        for holder in ranks:
            chunk = chunk_of(slot, holder, layout.world)
            memory = torch.full((slot.numel // slot.shape[0] * chunk.shape[0],), -1)
            for owner in ranks:
                piece = layout.piece(slot, owner)
                first = owner * layout.shard_numel + piece.offset - slot.start if piece else 0
                for overlap in overlaps(layout, slot, owner, holder):
                    at = first + overlap.in_piece
                    memory[overlap.in_chunk : overlap.in_chunk + overlap.numel] = values[
                        at : at + overlap.numel
                    ]
            actual = memory.as_strided(chunk.shape, chunk.stride)
            if holder < len(expected):
                assert torch.equal(actual, expected[holder])
                assert chunk.first_row == sum(len(before) for before in expected[:holder])
            else:
                assert chunk.shape[0] == 0


@given(layout=layouts())
def test_each_element_of_a_piece_is_in_one_chunk(layout: FlatLayout) -> None:
    for slot, owner in itertools.product(layout.slots, range(layout.world)):
        piece = layout.piece(slot, owner)
        elements = [
            element
            for holder in range(layout.world)
            for overlap in overlaps(layout, slot, owner, holder)
            for element in range(overlap.in_piece, overlap.in_piece + overlap.numel)
        ]
        assert sorted(elements) == list(range(piece.numel if piece else 0))


def round_trip(rank: Rank, *, layout: FlatLayout, dtypes: list[torch.dtype]) -> dict[str, Any]:
    groups = Groups(dist.group.WORLD if rank.world_size > 1 else None, None)
    exchanges = redistribution.Redistribution(layout, groups, torch.device(rank.device), "tested")
    received = 0
    issued = redistribution.all_to_all

    def counting(group: Any, output: torch.Tensor, *rest: Any) -> Any:
        nonlocal received
        received += output.nbytes
        return issued(group, output, *rest)

    pieces = []
    for number, (slot, dtype) in enumerate(zip(layout.slots, dtypes, strict=True)):
        piece = layout.piece(slot, rank.rank)
        first = rank.rank * layout.shard_numel + piece.offset - slot.start if piece else 0
        pieces.append(in_memory(slot.numel, number, dtype)[first : first + (piece.numel if piece else 0)])
    sharded = [
        redistribution.ShardPiece(number, piece.dtype, piece if piece.numel() else None)
        for number, piece in enumerate(pieces)
    ]
    redistribution.all_to_all = counting
    try:
        chunks = exchanges.chunks_from(sharded)
        received_for_chunks = received
        held = [redistribution.ShardChunk(number, chunk.contiguous()) for number, chunk in enumerate(chunks)]
        again = exchanges.pieces_from(held)
    finally:
        redistribution.all_to_all = issued
    return {
        "chunks": [chunk.clone() for chunk in chunks],
        "chunk_bytes": sum(chunk.nbytes for chunk in chunks),
        "received": received_for_chunks,
        "returned": [torch.equal(returned, piece) for returned, piece in zip(again, pieces, strict=True)],
        "returned_bytes": received - received_for_chunks,
        "piece_bytes": sum(piece.nbytes for piece in pieces),
    }


def in_memory(numel: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a parameter's elements in memory order. The numbers identify the parameter and the position."""
    return (torch.arange(numel) + 10 * number).to(dtype)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@share_of_examples(0.5)
@given(data=st.data())
def test_ranks_exchange_what_they_are_to_hold_and_no_more(
    ranks: Callable[..., RankPool], world: int, data: st.DataObject
) -> None:
    layout = data.draw(layouts(world))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in layout.slots]
    outcomes = ranks(world, "cpu").run(round_trip, layout=layout, dtypes=dtypes)
    for number, (slot, dtype) in enumerate(zip(layout.slots, dtypes, strict=True)):
        memory = in_memory(slot.numel, number, dtype)
        expected = full_tensor_of(slot, memory).chunk(world)
        for outcome, chunk in zip(outcomes, expected, strict=False):
            assert torch.equal(outcome["chunks"][number], chunk)
    for rank, outcome in enumerate(outcomes):
        stays = sum(
            overlap.numel * dtype.itemsize
            for slot, dtype in zip(layout.slots, dtypes, strict=True)
            for overlap in overlaps(layout, slot, rank, rank)
        )
        assert all(outcome["returned"])
        assert outcome["received"] == outcome["chunk_bytes"] - stays
        assert outcome["returned_bytes"] == outcome["piece_bytes"] - stays
