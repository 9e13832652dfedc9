"""Full tensors equal the concatenated shards of the ranks, however many are gathered at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.ranks import Rank, RankPool
from impl.distributed.checkpoint import _full_tensors

pytestmark = pytest.mark.deadline(120)


# A shape and how it is cut, by what it is called.
CUT: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {
    "rows": ((4, 3), torch.float32, 0),
    "an odd row": ((5, 2), torch.float32, 0),
    "a row for the first": ((1, 7), torch.float32, 0),
    "columns": ((3, 6, 2), torch.float32, 1),
    "low precision": ((6,), torch.bfloat16, 0),
    "whole numbers": ((8, 8), torch.int64, 0),
    "nothing": ((0, 3), torch.float32, 0),
    "the last ones": ((2, 6), torch.float32, -1),
}


def full(rank: Rank, *, exchange_bytes: int) -> dict[str, Any]:
    mesh = rank.mesh(rank.world_size)

    def spread(values: torch.Tensor, placement: Any) -> DTensor:
        return distribute_tensor(values, mesh, [placement], src_data_rank=None)

    values = {
        name: torch.arange(torch.Size(shape).numel()).add(number).view(shape).to(dtype)
        for number, (name, (shape, dtype, _)) in enumerate(CUT.items())
    }
    cut = {name: spread(values[name], Shard(dim)) for name, (_, _, dim) in CUT.items()}
    others = {
        "copies": spread(torch.ones(2), Replicate()),
        "odd columns": spread(torch.ones(2, 5), Shard(1)),
        "plain": torch.ones(2),
        "no tensor": [1, None, "one"],
    }
    kept_counts: list[int] = []
    exchanges, earlier = [], _full_tensors._EXCHANGE_BYTES
    gather = _full_tensors._gather
    _full_tensors._EXCHANGE_BYTES = exchange_bytes
    _full_tensors._gather = lambda cuts: (exchanges.append(len(cuts)), gather(cuts))[1]
    try:
        state = _full_tensors.with_full_tensors(
            {"cut": cut, "others": others}, lambda tensor: (kept_counts.append(len(exchanges)), tensor)[1]
        )
    finally:
        _full_tensors._EXCHANGE_BYTES, _full_tensors._gather = earlier, gather
    return {
        "wrong": [
            name
            for name, value in state["cut"].items()
            if type(value) is not torch.Tensor
            or value.dtype is not values[name].dtype
            or value.untyped_storage().nbytes() != value.nbytes
            or not (value.is_contiguous() and torch.equal(value, values[name]))
        ],
        "left": all(state["others"][name] is other for name, other in others.items() if name != "no tensor"),
        "no tensor": state["others"]["no tensor"],
        "exchanges": exchanges,
        "kept after": kept_counts,
    }


@pytest.mark.parametrize(
    ("world", "exchange_bytes", "exchanges"),
    [
        (2, 1 << 20, [6, 1, 1]),  # an exchange for each dtype
        (2, 100, [2, 1, 1, 1, 1, 2]),
        (2, 1, [1] * len(CUT)),
        (3, 1 << 20, [6, 1, 1]),
        (3, 100, [1, 1, 1, 1, 1, 1, 2]),  # fewer tensors for each exchange because of padding
    ],
)
def test_parts_make_up_full_tensors(
    ranks: Callable[..., RankPool], world: int, exchange_bytes: int, exchanges: list[int]
) -> None:
    for outcome in ranks(world).run(full, exchange_bytes=exchange_bytes):
        assert outcome["wrong"] == []
        assert outcome["left"]
        assert outcome["no tensor"] == [1, None, "one"]
        assert outcome["exchanges"] == exchanges
        # `keep` is called for each tensor before the next exchange, so that full tensors of two exchanges never
        # coexist.
        assert outcome["kept after"] == [
            number for number, many in enumerate(exchanges, 1) for _ in range(many)
        ]
