"""Where each parameter lies in a flat buffer, and which elements each rank owns: arithmetic on integers alone.

The numbers are torch's, because shards written by one must load into the other: parameters follow each other in the
order in which `named_modules` meets them, begin at multiples of `alignment` elements, and the buffer is sharded over
the ranks in equal widths; the tail may be short or empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class Slot:
    """One parameter in the flat buffer; positions count elements."""

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
    """What of one parameter lies in one rank's shard."""

    offset: int  # of its first element, in the shard
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    slots: tuple[Slot, ...]
    # With what was put between and behind the parameters, without the tail that evens out the shards.
    numel: int
    world: int

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.world)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world

    def piece(self, slot: Slot, rank: int) -> Piece | None:
        """None if the rank owns nothing of the parameter."""
        first = rank * self.shard_numel
        start, stop = max(slot.start, first), min(slot.stop, first + self.shard_numel)
        return Piece(start - first, stop - start) if start < stop else None

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the padded buffer that belong to no parameter; they hold zeros."""
        found: list[tuple[int, int]] = []
        end = 0
        for slot in self.slots:
            if slot.start > end:
                found.append((end, slot.start))
            end = slot.stop
        if self.padded_numel > end:
            found.append((end, self.padded_numel))
        return tuple(found)


def aligned_elements(itemsize: int) -> int:
    """How many elements of a dtype fill the distance at which parameters begin."""
    return _ALIGNED_BYTES // itemsize


def layout_of(
    named_shapes: Sequence[tuple[str, Sequence[int], Sequence[int]]], world: int, alignment: int = 1
) -> FlatLayout:
    """Lay out (name, shape, stride) one behind the other, for `world` ranks.

    With an `alignment` above 1 the buffer is also filled up to a multiple of `world`, so that no rank's shard is short.
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
    """Cut a shard into consecutive parts: their sizes, and for each piece the number of the part that it is."""
    sizes: list[int] = []
    numbers: list[int | None] = []
    end = 0
    for piece in pieces:
        if piece is None:
            numbers.append(None)
            continue
        if piece.offset > end:
            sizes.append(piece.offset - end)
        numbers.append(len(sizes))
        sizes.append(piece.numel)
        end = piece.offset + piece.numel
    if shard_numel > end:
        sizes.append(shard_numel - end)
    return sizes, numbers
