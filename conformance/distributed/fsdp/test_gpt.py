"""The gate's real model, on two ranks that have half of each batch: the curve of one process that has it all."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from conformance.clauses import clause
from conformance.distributed.fsdp.gpt_cases import PARTS, train_whole
from conformance.library import Library
from conformance.ranks import RankPool

STEPS = 24
full = pytest.mark.profile("full")
# Two terms have one sum in either order; what is left are roundings of the loss's mean over the ranks.
SAME_CURVE = 1e-5


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"),
    [
        ("FULL_SHARD", False),
        pytest.param("FULL_SHARD", True, marks=full),
        pytest.param("SHARD_GRAD_OP", True, marks=full),
        pytest.param("NO_SHARD", False, marks=full),
    ],
)
def test_gpt_learns_as_in_one_process(
    subject: Library, ranks: Callable[..., RankPool], strategy: str, use_orig_params: bool
) -> None:
    subject.find("distributed.fsdp.FullyShardedDataParallel")
    wanted = train_whole(STEPS)
    assert wanted[-1] < wanted[0] - 1, "the model learns, or its curve would tell nothing"
    seen = ranks(PARTS).run(
        "conformance.distributed.fsdp.gpt_cases:train_sharded",
        library=subject.spec,
        strategy=strategy,
        use_orig_params=use_orig_params,
        steps=STEPS,
        deadline_s=120,
    )
    for curve in seen:
        apart = [
            step for step in range(STEPS) if not math.isclose(curve[step], wanted[step], rel_tol=SAME_CURVE)
        ]
        assert not apart, f"steps {apart}: got {curve}, wanted {wanted}"
