"""Tests that warnings of `impl` name the line that called it and not a line of `impl`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.ranks import Rank, RankPool
from conformance.strategies.scaling import TakesScaler
from impl.amp import GradScaler
from impl.distributed.fsdp import FullyShardedDataParallel, ShardedGradScaler, StateDictType, checkpoint
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


STATE_DICT_TYPES = (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT)


def save_and_load(rank: Rank, *, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own lines may warn
        warnings.filterwarnings("error", category=FutureWarning, module=r"impl\.(?!tests\.)")
        for kind, use_orig_params in itertools.product(STATE_DICT_TYPES, (False, True)):
            _save_and_load(kind, use_orig_params, f"{path}/{kind.name}-{use_orig_params}")


def _save_and_load(kind: StateDictType, use_orig_params: bool, path: str) -> None:
    options = {"use_orig_params": use_orig_params}
    inner = FullyShardedDataParallel(nn.Linear(8, 8), **options)
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(8, 1)), **options)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(model, kind):
        model.load_state_dict(model.state_dict())
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
    if kind is StateDictType.SHARDED_STATE_DICT:
        checkpoint.save(path, model, optimizer)
        checkpoint.load(path, model, optimizer)


def test_sharded_state_dicts_give_no_future_warning(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    """torch warns if a ShardedTensor is used as a tensor.

    Tandem does not, so a user's warnings come from the user's code.
    """
    ranks(2).run(save_and_load, path=str(tmp_path))
