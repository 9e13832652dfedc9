"""What ranks are told of collectives that differ: of two things that could, the one that does."""

from __future__ import annotations

import pytest

from impl.distributed.fsdp._comm.desync.monitor import describe_difference

_PRECISION = "reduced 'blocks.1' with reduce_dtype=torch.bfloat16{}"
_DEFAULT = "reduced 'blocks.1'{}"


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (_PRECISION.format(""), _DEFAULT.format(""), "have sharded a module differently"),
        (
            _PRECISION.format(" divided by 3.0"),
            _DEFAULT.format(" divided by 3.0"),
            "have sharded a module differently",
        ),
        (
            _PRECISION.format(" without blocks.1.bias"),
            _DEFAULT.format(" without blocks.1.bias"),
            "have sharded a module differently",
        ),
        (
            _DEFAULT.format(" divided by 3.0 without blocks.1.bias"),
            _DEFAULT.format(" divided by 2.0 without blocks.1.bias"),
            "divide gradients by different factors",
        ),
        (
            _DEFAULT.format(" divided by 3.0"),
            _DEFAULT.format(" divided by 3.0 without blocks.1.bias"),
            "have gradients of different parameters",
        ),
    ],
)
def test_what_both_ranks_say_is_not_what_differs(ours: str, theirs: str, told: str) -> None:
    for pair in ((ours, theirs), (theirs, ours)):
        what, _ = describe_difference(*pair)
        assert what == f"the ranks {told}"
