"""Case in which a rank converts its pieces to chunks and back, and counts the received bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks import Rank
from impl.distributed.fsdp._comm.groups import Groups
from impl.distributed.fsdp._layout.flat_slots import FlatLayout
from impl.distributed.fsdp._state_dict import redistribution


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
