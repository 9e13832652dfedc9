"""Count the Triton kernels that public calls launch, as on a GPU."""

from __future__ import annotations

import pytest
import torch

from impl.kernels import RULES
from impl.kernels.tests import passes
from impl.kernels.tests.interpreter import the_interpreter

_UPDATES = {rule.OPTIMIZERS[-1].__name__: rule.KERNELS.triton for rule in RULES}


@pytest.mark.parametrize("optimizer", list(_UPDATES))
@pytest.mark.parametrize("copies", [None, torch.bfloat16], ids=str)
def test_fused_step_takes_two_passes(optimizer: str, copies: torch.dtype | None) -> None:
    """The first pass reads the gradients and the second updates. torch's operators see no long tensors."""
    actual = the_interpreter().call(passes.of_fused_step, optimizer, copies)
    expected = ["partial_norm_kernel", "finish_step_kernel", _UPDATES[optimizer]]
    assert actual == (expected, [], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("call", "launches"),
    [
        ("clip_grad_norm_", ["partial_norm_kernel", "finish_norm_kernel", "clip_kernel"]),
        (
            "fused_step",
            ["partial_norm_kernel", "finish_step_kernel", "add_", "adam_kernel", "_amp_update_scale_"],
        ),
        (
            "fused_step that keeps norms",
            [
                "partial_norm_kernel",
                "finish_step_kernel",
                "tensor_norms_kernel",
                "add_",
                "adam_kernel",
                "_amp_update_scale_",
            ],
        ),
        ("unscale_", ["zero_", "unscale_kernel"]),
    ],
)
def test_calls_launch_no_more(call: str, launches: list[str], dtype: torch.dtype) -> None:
    assert the_interpreter().call(passes.launched_by, call, dtype) == launches
