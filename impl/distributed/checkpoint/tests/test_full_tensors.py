"""Full tensors equal the concatenated shards of the ranks, however many are gathered at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.ranks import RankPool
from impl.distributed.checkpoint.tests.full_tensor_cases import CUT

pytestmark = pytest.mark.deadline(120)


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
    for outcome in ranks(world).run(
        "impl.distributed.checkpoint.tests.full_tensor_cases:full", exchange_bytes=exchange_bytes
    ):
        assert outcome["wrong"] == []
        assert outcome["left"]
        assert outcome["no tensor"] == [1, None, "one"]
        assert outcome["exchanges"] == exchanges
        # `keep` is called for each tensor before the next exchange, so that full tensors of two exchanges never
        # coexist.
        assert outcome["kept after"] == [
            number for number, many in enumerate(exchanges, 1) for _ in range(many)
        ]
