"""Nested units with different mixed precision, or with none."""

from __future__ import annotations

import pytest
import torch

from conformance.distributed.fsdp.nested_precision_cases import (
    Nesting,
    Precision,
    trained_in_parts,
    trained_unsharded,
)
from conformance.distributed.fsdp.precision_cases import without_some_classes
from conformance.distributed.fsdp.rank_judging import assert_all_close
from conformance.distributed.fsdp.twins import Twins, both_kinds
from conformance.judge.clauses import clause
from conformance.judge.tolerances import Tolerance

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
POLICIES: dict[str, tuple[Precision, Precision]] = {
    "outer alone": ({"param_dtype": BRAIN}, {}),
    "inner alone": ({}, {"param_dtype": BRAIN}),
    "two dtypes": ({"param_dtype": BRAIN}, {"param_dtype": HALF, "reduce_dtype": FULL}),
    "inner in full": ({"param_dtype": BRAIN, "reduce_dtype": BRAIN}, {"param_dtype": FULL}),
    "inner reduces": ({"param_dtype": HALF, "reduce_dtype": FULL}, {"reduce_dtype": BRAIN}),
    "inner casts": ({"param_dtype": BRAIN}, {"param_dtype": HALF, "cast_forward_inputs": True}),
    "outer keeps": ({"param_dtype": BRAIN, "keep_low_precision_grads": True}, {}),
}


def tolerance_of(*precisions: Precision) -> Tolerance:
    """Return a tolerance for units of these precisions, by the coarsest dtype. Each unit rounds to its own dtypes."""
    dtypes = [
        precision.get(name, FULL) for precision in precisions for name in ("param_dtype", "reduce_dtype")
    ]
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return Tolerance(8, "two backwards, each with a sum over the ranks and a quotient", coarsest, terms=1.0)


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.nested")
@pytest.mark.parametrize(("inner_strategy", "use_orig_params"), [("FULL_SHARD", True), ("NO_SHARD", False)])
@pytest.mark.parametrize("policy", POLICIES)
def test_each_unit_has_its_own_mixed_precision(
    cpu_twins: Twins, policy: str, inner_strategy: str, use_orig_params: bool
) -> None:
    nesting = Nesting(*POLICIES[policy], inner_strategy)
    both = tolerance_of(nesting.outer, nesting.inner)
    arguments = {"nesting": nesting, "use_orig_params": use_orig_params}
    actual = cpu_twins.agree(trained_in_parts, tolerance=both, **arguments)
    for unsharded, outcome in zip(trained_unsharded(nesting, len(actual)), actual, strict=True):
        for key in ("outputs", "input_gradients"):
            assert_all_close(key, unsharded[key], outcome.value[key], both)
        for is_inner, precision in ((True, nesting.inner), (False, nesting.outer)):
            expected_gradients, whole = (
                {name: grad for name, grad in gradients.items() if name.startswith("1.") is is_inner}
                for gradients in (unsharded["whole_gradients"], outcome.value["whole_gradients"])
            )
            assert_all_close("whole_gradients", expected_gradients, whole, tolerance_of(precision))


@clause("distributed.fsdp.fully_sharded_data_parallel.mixed_precision.nested")
@both_kinds
@pytest.mark.parametrize("kind", ["LayerNorm", "Linear"])
def test_modules_of_some_classes_are_left_in_full_precision(
    cpu_twins: Twins, kind: str, use_orig_params: bool
) -> None:
    tolerance = tolerance_of({"param_dtype": BRAIN})
    arguments = {"kind": kind, "use_orig_params": use_orig_params}
    outcomes = cpu_twins.agree(without_some_classes, tolerance=tolerance, **arguments)
    assert {weight for _, _, weight, _ in outcomes[0].value["dtypes"]} == {FULL, BRAIN}
