"""Case that saves and loads sharded state dicts. FutureWarnings at a line of impl, tests aside, are errors."""

from __future__ import annotations

import itertools
import warnings

import torch
from torch import nn

from conformance.ranks import Rank
from impl.distributed.fsdp import FullyShardedDataParallel, StateDictType, checkpoint

KINDS = (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT)


def save_and_load(rank: Rank, *, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own lines may warn
        warnings.filterwarnings("error", category=FutureWarning, module=r"impl\.(?!tests\.)")
        for kind, use_orig_params in itertools.product(KINDS, (False, True)):
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
