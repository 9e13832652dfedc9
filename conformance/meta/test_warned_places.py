"""Warnings of `impl` name the line that called it, not one of its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from conformance.strategies.scaling import TakesScaler
from impl.amp import GradScaler
from impl.distributed.fsdp import ShardedGradScaler

KINDS = pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])


@KINDS
def test_a_scaler_without_cuda(monkeypatch: pytest.MonkeyPatch, kind: type[GradScaler]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        kind()
    assert [warning.filename for warning in caught] == [__file__]


@KINDS
def test_the_step_of_an_optimizer_that_takes_the_scaler(
    monkeypatch: pytest.MonkeyPatch, kind: type[GradScaler]
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    parameter = torch.nn.Parameter(torch.ones(1))
    scaler = kind("cpu")
    scaler.scale(parameter.sum()).backward()
    with pytest.warns(FutureWarning, match="grad_scale") as caught:
        scaler.step(TakesScaler([parameter]))
    assert [warning.filename for warning in caught] == [__file__]
