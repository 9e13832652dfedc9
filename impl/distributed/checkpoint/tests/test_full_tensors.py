"""Whole tensors are the ranks' parts one behind the other, however many travel at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.ranks import RankPool
from impl.distributed.checkpoint.tests.full_tensor_cases import CUT

pytestmark = pytest.mark.deadline(120)


@pytest.mark.parametrize(
    ("world", "exchange_bytes", "exchanges"),
    [
        (2, 1 << 20, [6, 1, 1]),  # one for each dtype
        (2, 100, [2, 1, 1, 1, 1, 2]),
        (2, 1, [1] * len(CUT)),
        (3, 1 << 20, [6, 1, 1]),
        (3, 100, [1, 1, 1, 1, 1, 1, 2]),  # with more padding, fewer go together
    ],
)
def test_parts_make_up_full_tensors(
    ranks: Callable[..., RankPool], world: int, exchange_bytes: int, exchanges: list[int]
) -> None:
    for seen in ranks(world).run(
        "impl.distributed.checkpoint.tests.full_tensor_cases:full", exchange_bytes=exchange_bytes
    ):
        assert seen["wrong"] == []
        assert seen["left"]
        assert seen["no tensor"] == [1, None, "one"]
        assert seen["exchanges"] == exchanges
        # What is kept of each is settled before the next one: others never lie there together.
        assert seen["kept after"] == [number for number, many in enumerate(exchanges, 1) for _ in range(many)]
