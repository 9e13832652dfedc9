"""Norms of updates, which copy the parameters batch by batch."""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn

from impl.amp import GradScaler


def ratios(longest: int) -> tuple[dict[str, torch.Tensor], list[nn.Parameter]]:
    """Return `update_ratios` of a fused step, and the new parameters."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(numel, generator=generator)) for numel in (3, 0, 40, 1, 25, 7)]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    scaler, optimizer = GradScaler("cpu"), torch.optim.AdamW(params, lr=0.1)
    scaler.scale(torch.ones(()))
    with mock.patch("impl.optim._param_norms._LONGEST_ON_HOST", longest):
        scaler.fused_step(optimizer, 1.0, keep_update_norms=True)
    return scaler.update_ratios(optimizer), params


def test_batches_change_neither_ratios_nor_parameters() -> None:
    """A batch of at most 30 elements has several parameters, a single long one, or empty ones."""
    (expected, params), (by_batch, params_by_batch) = ratios(1000), ratios(30)
    assert by_batch == expected
    assert all(map(torch.equal, params_by_batch, params))
