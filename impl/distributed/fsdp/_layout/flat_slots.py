"""Positions of parameters in a flat buffer, and the elements that each rank owns: arithmetic on integers.

The numbers are torch's, because shards written by one library must load into the other. Parameters are in
`named_modules` order and start at multiples of `alignment` elements. The buffer is sharded over the ranks in equal
widths. Its tail may be short or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class Slot:
    """Place of one parameter in the flat buffer. Positions count elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Piece:
    """Range of one parameter's elements in one rank's shard."""

    offset: int  # position of the first element in the shard
    start: int  # position of the first element in the parameter
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    slots: tuple[Slot, ...]
    # Includes the padding between and after the parameters, without the tail that makes the shards equal.
    numel: int
    world: int

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.world)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world

    def piece(self, slot: Slot, rank: int) -> Piece | None:
        """Return the piece that `rank` owns of the parameter, or None if it owns nothing."""
        first = rank * self.shard_numel
        start, stop = max(slot.start, first), min(slot.stop, first + self.shard_numel)
        return Piece(start - first, start - slot.start, stop - start) if start < stop else None

    def is_on_every_rank(self, slots: Iterable[Slot]) -> bool:
        """Return whether every rank owns elements of at least one of these parameters."""
        owners: set[int] = set()
        for slot in slots:
            if slot.numel:
                owners.update(range(slot.start // self.shard_numel, (slot.stop - 1) // self.shard_numel + 1))
        return len(owners) == self.world

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the padded buffer that belong to no parameter and contain zeros."""
        ranges: list[tuple[int, int]] = []
        end = 0
        for slot in self.slots:
            if slot.start > end:
                ranges.append((end, slot.start))
            end = slot.stop
        if self.padded_numel > end:
            ranges.append((end, self.padded_numel))
        return tuple(ranges)


def aligned_elements(itemsize: int) -> int:
    """Return the alignment of parameters as a number of elements of `itemsize` bytes."""
    return _ALIGNED_BYTES // itemsize


def layout_of(
    named_shapes: Sequence[tuple[str, Sequence[int], Sequence[int]]], world: int, alignment: int
) -> FlatLayout:
    """Return the layout of consecutive parameters, given as (name, shape, stride), for `world` ranks.

    With an `alignment` above 1 the buffer is also padded to a multiple of `world`, so that no rank's shard is short.
    """
    slots: list[Slot] = []
    end = 0
    for name, shape, stride in named_shapes:
        start = -(-end // alignment) * alignment
        slots.append(Slot(name, tuple(shape), tuple(stride), start))
        end = slots[-1].stop
    if alignment > 1:
        end = -(-end // world) * world
    return FlatLayout(tuple(slots), end, world)


def split_sizes(pieces: Sequence[Piece | None], shard_numel: int) -> tuple[list[int], list[int | None]]:
    """Return the sizes of a shard's sections (pieces and gaps), and for each piece the index of its section."""
    sizes: list[int] = []
    section_of_piece: list[int | None] = []
    end = 0
    for piece in pieces:
        if piece is None:
            section_of_piece.append(None)
            continue
        if piece.offset > end:
            sizes.append(piece.offset - end)
        section_of_piece.append(len(sizes))
        sizes.append(piece.numel)
        end = piece.offset + piece.numel
    if shard_numel > end:
        sizes.append(shard_numel - end)
    return sizes, section_of_piece
