"""Two ways of sharding a parameter: by the piece of it in a rank's shard, and by the rows that `torch.chunk` gives.

Pieces are what units keep; chunks are what ShardedTensor and DTensor hold, and move between worlds by. Both sides of an
exchange follow from the layout, so nothing is negotiated, and a rank receives the bytes of its chunks or pieces alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from impl.distributed.fsdp._comm.group_collectives import all_to_all
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.flat_slots import FlatLayout, Slot
from impl.distributed.fsdp._layout.sharded_param import rows_of


@dataclass(frozen=True)
class Chunk:
    """The rows that one rank holds of a parameter, or of anything in its shape; none for the last ranks of many."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first_row: int

    @property
    def stop_row(self) -> int:
        return self.first_row + self.shape[0]


def chunk_of(slot: Slot, rank: int, world: int) -> Chunk:
    """What `torch.chunk` along the first dimension gives a rank; laid out in memory as the parameter is."""
    rows = slot.shape[0]
    first, stop = rows_of(rows, rank, world)
    count = stop - first
    period = rows * slot.stride[0]
    stride = tuple(s * count // rows if rows > 1 and s >= period else s for s in slot.stride)
    return Chunk((count, *slot.shape[1:]), stride, first)


@dataclass(frozen=True)
class Overlap:
    """Elements that lie next to each other both in one rank's piece and in another's chunk."""

    in_piece: int  # of the first one, counted in the piece
    in_chunk: int  # and in the chunk's memory
    numel: int


def overlaps(layout: FlatLayout, slot: Slot, owner: int, holder: int) -> Iterator[Overlap]:
    """What of `owner`'s piece of a parameter is in `holder`'s chunk of it, in ascending order."""
    piece = layout.piece(slot, owner)
    if piece is None:
        return
    piece_start = owner * layout.shard_numel + piece.offset - slot.start
    passed = 0
    for start, stop in _runs(slot, chunk_of(slot, holder, layout.world)):
        first, end = max(start, piece_start), min(stop, piece_start + piece.numel)
        if first < end:
            yield Overlap(first - piece_start, passed + first - start, end - first)
        passed += stop - start


def _runs(slot: Slot, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Where the chunk's elements lie in the parameter's memory: in several runs if its rows are not outermost."""
    rows, width = slot.shape[0], slot.stride[0]
    if chunk.shape[0] == rows:
        yield 0, slot.numel
    elif chunk.shape[0] and slot.numel:
        period = rows * width
        for start in range(0, slot.numel, period):
            yield start + chunk.first_row * width, start + chunk.stop_row * width


@dataclass(frozen=True)
class ShardPiece:
    """A rank's piece of a tensor in a parameter's shape: the parameter itself, or what an optimizer keeps for it."""

    slot: int  # the parameter's number in the layout
    dtype: torch.dtype
    piece: Tensor | None  # without gaps; None if nothing of the parameter lies in this rank's shard


@dataclass(frozen=True)
class ShardChunk:
    """A rank's chunk of such a tensor."""

    slot: int
    chunk: Tensor  # [rows, ...], of any strides; without rows for the last ranks of many


@dataclass(frozen=True)
class _Range:
    """Bytes of one of the tensors that take part."""

    index: int
    start: int
    length: int


# For each rank what is sent to it, or received from it.
_Route = list[list[_Range]]


class Redistribution:
    """Exchanges within the group that a flat parameter is sharded over.

    Args:
        layout: the flat parameter's.
        groups: its unit's.
        device: what is received lies there; the group's collectives can be run on it.
        name: the unit's.
    """

    def __init__(self, layout: FlatLayout, groups: Groups, device: torch.device, name: str) -> None:
        self._layout = layout
        self._groups = groups
        self._rank = groups.shard_rank
        self._device = device
        self._name = name

    @torch.no_grad()
    def chunks_from(self, tensors: Sequence[ShardPiece]) -> list[Tensor]:
        """The rank's chunk of each tensor, in memory of its own; no rows for the last ranks of many.

        Args:
            tensors: on all ranks the same slots and dtypes, in the same order.
        Collectives: one all-to-all, in bytes; none if the flat parameter is not sharded.
        """
        made = [self._chunk(one.slot) for one in tensors]
        chunks = [
            torch.empty_strided(chunk.shape, chunk.stride, dtype=one.dtype, device=self._device)
            for one, chunk in zip(tensors, made, strict=True)
        ]
        sources = [None if one.piece is None else _bytes_of(one.piece.to(self._device)) for one in tensors]
        owned, held = self._routes([(one.slot, one.dtype.itemsize) for one in tensors])
        self._exchange(sources, owned, [_bytes_of(chunk) for chunk in chunks], held)
        return chunks

    @torch.no_grad()
    def pieces_from(self, tensors: Sequence[ShardChunk]) -> list[Tensor]:
        """The rank's piece of each tensor, 1-D, in memory of its own; as `chunks_from` in the other direction."""
        found = [self._layout.piece(self._layout.slots[one.slot], self._rank) for one in tensors]
        pieces = [
            torch.empty(piece.numel if piece else 0, dtype=one.chunk.dtype, device=self._device)
            for one, piece in zip(tensors, found, strict=True)
        ]
        sources = [
            _bytes_of(laid_out_as(one.chunk.to(self._device), self._chunk(one.slot))) for one in tensors
        ]
        owned, held = self._routes([(one.slot, one.chunk.dtype.itemsize) for one in tensors])
        self._exchange(sources, held, [_bytes_of(piece) for piece in pieces], owned)
        return pieces

    def _chunk(self, number: int) -> Chunk:
        return chunk_of(self._layout.slots[number], self._rank, self._layout.world)

    def _routes(self, items: Sequence[tuple[int, int]]) -> tuple[_Route, _Route]:
        """For (slot, itemsize) of each tensor: the rank's pieces by who holds them, its chunks by who owns them."""
        layout = self._layout
        owned: _Route = [[] for _ in range(layout.world)]
        held: _Route = [[] for _ in range(layout.world)]
        for index, (number, size) in enumerate(items):
            slot = layout.slots[number]
            owners = range(slot.start // layout.shard_numel, -(-slot.stop // layout.shard_numel))
            for peer in range(layout.world) if self._rank in owners else ():
                for one in overlaps(layout, slot, self._rank, peer):
                    owned[peer].append(_Range(index, one.in_piece * size, one.numel * size))
            for peer in owners:
                for one in overlaps(layout, slot, peer, self._rank):
                    held[peer].append(_Range(index, one.in_chunk * size, one.numel * size))
        return owned, held

    def _exchange(
        self, sources: Sequence[Tensor | None], outgoing: _Route, targets: Sequence[Tensor], incoming: _Route
    ) -> None:
        """Copy ranges of the sources, 1-D bytes, into ranges of the targets of all ranks.

        What a rank has of its own goes from one to the other, and not through what is sent.
        """
        stays, arrives = outgoing[self._rank], incoming[self._rank]
        if stays:
            torch._foreach_copy_(
                [_narrowed(targets, one) for one in arrives], [_narrowed(sources, one) for one in stays]
            )
        group = self._groups.shard
        if group is None:
            return
        outgoing, incoming = (self._without_own(route) for route in (outgoing, incoming))
        parts = [_narrowed(sources, one) for ranges in outgoing for one in ranges]
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self._device)
        received = sent.new_empty(sum(_lengths(incoming)))
        self._groups.order_checkers[group].run(
            f"resharded '{self._name}'",
            all_to_all,
            group,
            received,
            sent,
            _lengths(incoming),
            _lengths(outgoing),
        )
        ranges = [one for ranges in incoming for one in ranges]
        if ranges:
            arrived = received.split_with_sizes([one.length for one in ranges])
            torch._foreach_copy_([_narrowed(targets, one) for one in ranges], arrived)

    def _without_own(self, route: _Route) -> _Route:
        return [[] if peer == self._rank else ranges for peer, ranges in enumerate(route)]


def _lengths(route: _Route) -> list[int]:
    return [sum(one.length for one in ranges) for ranges in route]


def _narrowed(tensors: Sequence[Tensor | None], one: _Range) -> Tensor:
    tensor = tensors[one.index]
    assert tensor is not None
    return tensor.narrow(0, one.start, one.length)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor without gaps, as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def laid_out_as(tensor: Tensor, like: Chunk | Slot) -> Tensor:
    """The same elements in the order of memory in which a flat parameter has them; of no subclass of Tensor."""
    if type(tensor) is Tensor and tensor.stride() == like.stride:
        return tensor
    laid_out = torch.empty_strided(like.shape, like.stride, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(tensor)
