"""A fused step by Triton's kernels goes over memory twice, and the host takes nothing from the device."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.kernels import passes
from conformance.kernels.calls import checked_norm_by
from conformance.kernels.interpreter import the_interpreter

_UPDATES = {"AdamW": "adam_kernel", "SGD": "sgd_kernel", "Adagrad": "adagrad_kernel"}


@pytest.mark.parametrize("optimizer", list(_UPDATES))
@pytest.mark.parametrize("copies", [None, torch.bfloat16], ids=str)
def test_a_fused_step_is_two_passes(optimizer: str, copies: torch.dtype | None) -> None:
    """One reads the gradients, one updates; torch's operators see numbers, counters and tables alone."""
    seen = the_interpreter().call(passes.of_fused_step, optimizer, copies)
    wanted = ["partial_norm_kernel", "finish_norm_kernel", _UPDATES[optimizer], "update_scale_kernel"]
    assert seen == (wanted, [], 0)


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_norm_that_overflows_is_not_found_to_be_inf(
    bad: float | None, norm_type: float, dtype: torch.dtype
) -> None:
    """The flag tells of the elements, and of each one of them; the norm of finite ones may be too large for f32."""
    tensors = [torch.full((size,), torch.finfo(dtype).max, dtype=dtype) for size in (3, 1500)]
    if bad is not None:
        tensors[1][-1] = bad
    norm, found = the_interpreter().call(checked_norm_by, "triton", tensors, norm_type)
    assert found == float(bad is not None)
    wanted = torch.linalg.vector_norm(torch.cat(tensors).double(), norm_type).float().item()
    assert norm == pytest.approx(wanted, rel=2.0**-23, nan_ok=True)
