"""Exchange between two ways to shard a parameter: pieces of a flat parameter, and rows in `torch.chunk` order.

Units keep pieces. ShardedTensor and DTensor contain chunks, which other numbers of ranks can load. Both sides of an
exchange follow from the layout, so nothing is negotiated. A rank only receives the bytes of its chunks or pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from impl.distributed.fsdp._comm.group_collectives import all_to_all
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.flat_slots import FlatLayout, Piece, Slot
from impl.distributed.fsdp._layout.sharded_param import rows_of


@dataclass(frozen=True)
class Chunk:
    """Rows that one rank has of a parameter, or of a tensor in its shape. The last ranks may have none."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first_row: int

    @property
    def stop_row(self) -> int:
        return self.first_row + self.shape[0]


def chunk_of(slot: Slot, rank: int, world: int) -> Chunk:
    """Return the rows that `torch.chunk` gives a rank along the first dimension, in the parameter's memory order."""
    rows = slot.shape[0]
    first, stop = rows_of(rows, rank, world)
    count = stop - first
    period = rows * slot.stride[0]
    stride = tuple(s * count // rows if rows > 1 and s >= period else s for s in slot.stride)
    return Chunk((count, *slot.shape[1:]), stride, first)


@dataclass(frozen=True)
class Overlap:
    """Elements that are contiguous both in one rank's piece and in another's chunk."""

    in_piece: int  # position of the first element in the piece
    in_chunk: int  # position of the first element in the chunk's memory
    numel: int


def overlaps(layout: FlatLayout, slot: Slot, owner: int, holder: int) -> Iterator[Overlap]:
    """Yield the overlaps of `owner`'s piece of a parameter with `holder`'s chunk of it, in ascending order."""
    piece = layout.piece(slot, owner)
    if piece is None:
        return
    passed = 0
    for start, stop in _runs(slot, chunk_of(slot, holder, layout.world)):
        first, end = max(start, piece.start), min(stop, piece.start + piece.numel)
        if first < end:
            yield Overlap(first - piece.start, passed + first - start, end - first)
        passed += stop - start


def _runs(slot: Slot, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each run of a chunk in the parameter's memory.

    There are several if rows are not outermost, as in a transposed weight.
    """
    rows, row_stride = slot.shape[0], slot.stride[0]
    if chunk.shape[0] == rows:
        yield 0, slot.numel
    elif chunk.shape[0] and slot.numel:
        for start in range(0, slot.numel, rows * row_stride):
            yield start + chunk.first_row * row_stride, start + chunk.stop_row * row_stride


@dataclass(frozen=True)
class ShardPiece:
    """A rank's piece of a tensor in a parameter's shape: the parameter itself, or a state of its optimizer."""

    slot: int  # index of the parameter in the layout
    dtype: torch.dtype
    # A tensor without gaps, or None if the rank owns nothing of the parameter.
    piece: Tensor | None


@dataclass(frozen=True)
class ShardChunk:
    """A rank's chunk of a tensor in a parameter's shape."""

    slot: int
    # Tensor [rows, ...] of any strides. The last ranks may have no rows.
    chunk: Tensor


@dataclass(frozen=True)
class _Range:
    """Range of bytes of one of the exchanged tensors."""

    index: int
    start: int
    length: int


# Ranges that are sent to, or received from, each rank.
_Route = list[list[_Range]]


class Redistribution:
    """Exchanges within the group that a flat parameter is sharded over.

    Args:
        layout: layout of the flat parameter.
        groups: groups of its unit.
        device: device of the received tensors, on which the group's collectives can run.
        name: name of the unit.
    """

    def __init__(self, layout: FlatLayout, groups: Groups, device: torch.device, name: str) -> None:
        self._layout = layout
        self._groups = groups
        self._rank = groups.shard_rank
        self._device = device
        self._name = name

    @torch.no_grad()
    def chunks_from(self, tensors: Sequence[ShardPiece]) -> list[Tensor]:
        """Return copies of the rank's chunk of each tensor. The last ranks may get no rows.

        Args:
            tensors: on all ranks the same slots and dtypes, in the same order.
        Collectives: one all-to-all, in bytes; none if the flat parameter is not sharded.
        """
        layouts = [self._chunk(tensor.slot) for tensor in tensors]
        chunks = [
            torch.empty_strided(chunk.shape, chunk.stride, dtype=tensor.dtype, device=self._device)
            for tensor, chunk in zip(tensors, layouts, strict=True)
        ]
        sources = [
            None if tensor.piece is None else _bytes_of(tensor.piece.to(self._device)) for tensor in tensors
        ]
        owned, held = self._routes([(tensor.slot, tensor.dtype.itemsize) for tensor in tensors])
        self._exchange(sources, owned, [_bytes_of(chunk) for chunk in chunks], held)
        return chunks

    @torch.no_grad()
    def pieces_from(self, tensors: Sequence[ShardChunk]) -> list[Tensor]:
        """Return copies of the rank's piece of each tensor, 1-D: the reverse of `chunks_from`."""
        own_pieces = [self._layout.piece(self._layout.slots[tensor.slot], self._rank) for tensor in tensors]
        pieces = [
            torch.empty(piece.numel if piece else 0, dtype=tensor.chunk.dtype, device=self._device)
            for tensor, piece in zip(tensors, own_pieces, strict=True)
        ]
        sources = [
            _bytes_of(in_flat_order(tensor.chunk.to(self._device), self._chunk(tensor.slot)))
            for tensor in tensors
        ]
        owned, held = self._routes([(tensor.slot, tensor.chunk.dtype.itemsize) for tensor in tensors])
        self._exchange(sources, held, [_bytes_of(piece) for piece in pieces], owned)
        return pieces

    def _chunk(self, number: int) -> Chunk:
        return chunk_of(self._layout.slots[number], self._rank, self._layout.world)

    def _routes(self, items: Sequence[tuple[int, int]]) -> tuple[_Route, _Route]:
        """Return the rank's pieces by the ranks that hold them as chunks, and its chunks by the ranks that own them.

        `items` are (slot, itemsize) of each tensor.
        """
        layout = self._layout
        owned: _Route = [[] for _ in range(layout.world)]
        held: _Route = [[] for _ in range(layout.world)]
        for index, (number, size) in enumerate(items):
            slot = layout.slots[number]
            owners = range(slot.start // layout.shard_numel, -(-slot.stop // layout.shard_numel))
            for peer in range(layout.world) if self._rank in owners else ():
                for overlap in overlaps(layout, slot, self._rank, peer):
                    owned[peer].append(_Range(index, overlap.in_piece * size, overlap.numel * size))
            for peer in owners:
                for overlap in overlaps(layout, slot, peer, self._rank):
                    held[peer].append(_Range(index, overlap.in_chunk * size, overlap.numel * size))
        return owned, held

    def _exchange(
        self, sources: Sequence[Tensor | None], outgoing: _Route, targets: Sequence[Tensor], incoming: _Route
    ) -> None:
        """Copy ranges of the sources, 1-D bytes, into ranges of the targets of all ranks.

        Ranges of this rank itself are copied directly.
        """
        stays, arrives = outgoing[self._rank], incoming[self._rank]
        if stays:
            torch._foreach_copy_(
                [_bytes_in(targets, part) for part in arrives], [_bytes_in(sources, part) for part in stays]
            )
        group = self._groups.shard
        if group is None:
            return
        outgoing, incoming = (self._without_own(route) for route in (outgoing, incoming))
        pieces = [_bytes_in(sources, part) for ranges in outgoing for part in ranges]
        sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=self._device)
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
        ranges = [part for ranges in incoming for part in ranges]
        if ranges:
            arrived = received.split_with_sizes([part.length for part in ranges])
            torch._foreach_copy_([_bytes_in(targets, part) for part in ranges], arrived)

    def _without_own(self, route: _Route) -> _Route:
        return [[] if peer == self._rank else ranges for peer, ranges in enumerate(route)]


def _lengths(route: _Route) -> list[int]:
    return [sum(part.length for part in ranges) for ranges in route]


def _bytes_in(tensors: Sequence[Tensor | None], part: _Range) -> Tensor:
    tensor = tensors[part.index]
    assert tensor is not None
    return tensor.narrow(0, part.start, part.length)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor without gaps, as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def in_flat_order(tensor: Tensor, like: Chunk | Slot) -> Tensor:
    """Return the elements in the memory order of a flat parameter, as a plain tensor."""
    if type(tensor) is Tensor and tensor.stride() == like.stride:
        return tensor
    dense = torch.empty_strided(like.shape, like.stride, dtype=tensor.dtype, device=tensor.device)
    return dense.copy_(tensor)


def elements_of(piece: Piece, unsharded: Tensor, slot: Slot) -> Tensor:
    """Return the elements of a piece, 1-D, of a tensor in the shape of the slot."""
    return in_flat_order(unsharded, slot).as_strided((slot.numel,), (1,)).narrow(0, piece.start, piece.numel)
