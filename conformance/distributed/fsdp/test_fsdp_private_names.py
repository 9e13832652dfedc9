"""Private names of torch that clients rely on: the rows of `compat_names.toml` that need ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.distributed.fsdp.fsdp_cases import FSDP
from conformance.distributed.fsdp.private_name_cases import read, upcast
from conformance.distributed.fsdp.twins import Twins, both_kinds, each_strategy
from conformance.judge.clauses import clause
from conformance.judge.files.compat import COMPAT_NAMES, CompatName
from conformance.judge.tolerances import TRAINED, Tolerance

_ROWS = [row for row in COMPAT_NAMES if row.on_ranks]
LOW = torch.bfloat16
_MIXED = {"param_dtype": LOW, "reduce_dtype": LOW, "buffer_dtype": LOW}
TOLERANCE = Tolerance(8, "three steps of Adam with bfloat16 gradients, each a sum over ranks", LOW, terms=1.0)


@clause("distributed.fsdp.fully_sharded_data_parallel.private_names")
@both_kinds
@pytest.mark.parametrize(
    "row", _ROWS, ids=lambda row: f"{row.owner.removeprefix(FSDP)}.{row.name}".lstrip(".")
)
def test_name_that_others_read_says_what_torchs_says(
    twins: Twins, row: CompatName, use_orig_params: bool
) -> None:
    path = row.owner.removeprefix(FSDP).lstrip(".")
    twins.agree(read, tolerance=TRAINED, path=path, name=row.name, use_orig_params=use_orig_params)


@clause("distributed.fsdp.fully_sharded_data_parallel.upcast")
@pytest.mark.parametrize("mixed_precision", [None, _MIXED], ids=["as loaded", "mixed precision"])
@pytest.mark.parametrize(
    ("use_orig_params", "frozen"),
    [(False, False), (True, False), pytest.param(True, True, id="frozen in part")],
)
@each_strategy
def test_low_precision_model_trains_in_full_precision(
    twins: Twins, strategy: str, use_orig_params: bool, mixed_precision: dict[str, Any] | None, frozen: bool
) -> None:
    wrapping = {"strategy": strategy, "use_orig_params": use_orig_params}
    twins.agree(upcast, tolerance=TOLERANCE, mixed_precision=mixed_precision, frozen=frozen, **wrapping)
