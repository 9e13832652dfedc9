"""Names that are private in torch and that clients rely on: rows of `compat_names.toml` for what lives on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.distributed.fsdp.fsdp_cases import FSDP
from conformance.distributed.fsdp.judging import assert_ranks_agree, outcomes
from conformance.judge.clauses import clause
from conformance.judge.compat import COMPAT_NAMES, CompatName
from conformance.judge.library import Library
from conformance.judge.tolerances import Tolerance
from conformance.ranks import RankPool

_ROWS = [row for row in COMPAT_NAMES if row.on_ranks]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
LOW = torch.bfloat16
_MIXED = {"param_dtype": LOW, "reduce_dtype": LOW, "buffer_dtype": LOW}
TOLERANCE = Tolerance(8, "three steps of Adam with bfloat16 gradients, each a sum over ranks", LOW, terms=1.0)


@clause("distributed.fsdp.fully_sharded_data_parallel.private_names")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "row", _ROWS, ids=lambda row: f"{row.owner.removeprefix(FSDP)}.{row.name}".lstrip(".")
)
def test_name_that_others_read_says_what_torchs_says(
    subject: Library, reference: Library, rank_pool: RankPool, row: CompatName, use_orig_params: bool
) -> None:
    expected, actual = (
        outcomes(
            rank_pool,
            library,
            "private_name_cases:read",
            path=row.owner.removeprefix(FSDP).lstrip("."),
            name=row.name,
            use_orig_params=use_orig_params,
        )
        for library in (reference, subject)
    )
    assert_ranks_agree(expected, actual)
    assert actual[0].raised is None, f"{row.owner}.{row.name} is used by {row.used_by}: {actual[0].raised}"


@clause("distributed.fsdp.fully_sharded_data_parallel.upcast")
@pytest.mark.parametrize("mixed_precision", [None, _MIXED], ids=["as loaded", "mixed precision"])
@pytest.mark.parametrize(
    ("use_orig_params", "frozen"),
    [(False, False), (True, False), pytest.param(True, True, id="frozen in part")],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_in_low_precision_may_be_trained_in_full_precision(
    subject: Library,
    reference: Library,
    rank_pool: RankPool,
    strategy: str,
    use_orig_params: bool,
    mixed_precision: dict[str, Any] | None,
    frozen: bool,
) -> None:
    case = {
        "strategy": strategy,
        "use_orig_params": use_orig_params,
        "mixed_precision": mixed_precision,
        "frozen": frozen,
    }
    expected, actual = (
        outcomes(rank_pool, library, "private_name_cases:upcast", **case) for library in (reference, subject)
    )
    assert_ranks_agree(expected, actual, TOLERANCE)
    assert all(outcome.raised is None for outcome in actual), actual[0].raised
