"""Error texts for different collectives of ranks name the actual difference."""

from __future__ import annotations

import pytest

from impl.distributed.fsdp._comm.desync.monitor import describe_difference

_PRECISION = "reduced 'blocks.1' with reduce_dtype=torch.bfloat16{}"
_DEFAULT = "reduced 'blocks.1'{}"


@pytest.mark.parametrize(
    ("entry", "other_entry", "expected"),
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
def test_difference_ignores_text_common_to_both_ranks(entry: str, other_entry: str, expected: str) -> None:
    for pair in ((entry, other_entry), (other_entry, entry)):
        problem, _ = describe_difference(*pair)
        assert problem == f"the ranks {expected}"
