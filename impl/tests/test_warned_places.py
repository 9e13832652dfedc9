"""Tests that warnings of `impl` name the line that called it and not a line of `impl`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conformance.ranks import RankPool
from conformance.strategies.scaling import TakesScaler
from impl.amp import GradScaler
from impl.distributed.fsdp import ShardedGradScaler
from impl.optim import capture

KINDS = pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])


@KINDS
def test_scaler_without_cuda_warns_at_call(monkeypatch: pytest.MonkeyPatch, kind: type[GradScaler]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        kind()
    assert [warning.filename for warning in caught] == [__file__]


@KINDS
def test_step_with_scaler_argument_warns_at_call(
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


def test_capture_of_eager_optimizer_warns_at_call() -> None:
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))])
    with pytest.warns(UserWarning, match="LBFGS builds no lists") as caught:
        capture(optimizer)
    assert [warning.filename for warning in caught] == [__file__]


def test_sharded_state_dicts_give_no_future_warning(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    """torch warns if a ShardedTensor is used as a tensor.

    Tandem does not, so a user's warnings come from the user's code.
    """
    ranks(2).run("impl.tests.warned_cases:save_and_load", path=str(tmp_path))
