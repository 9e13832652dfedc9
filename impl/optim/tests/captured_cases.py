"""Case of a rank: train a sharded model with a plain optimizer, and an equal model with a captured optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.ranks import Rank
from impl.distributed.fsdp import FullyShardedDataParallel, ShardedGradScaler
from impl.optim import capture, explain
from impl.optim.tests.captured_twins import snapshot


def train_both(rank: Rank, *, use_orig_params: bool, options: dict[str, Any]) -> list[Any]:
    """Return whether both trainings are equal, and the explanation of the captured one."""
    plain, captured = (_train(rank, use_orig_params, options, is_captured) for is_captured in (False, True))
    return [plain["trained"] == captured["trained"], captured["how"]]


def _train(rank: Rank, use_orig_params: bool, options: dict[str, Any], is_captured: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    inner = FullyShardedDataParallel(nn.Linear(6, 5), use_orig_params=use_orig_params)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 6), inner, nn.Linear(5, 1)), use_orig_params=use_orig_params
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    if is_captured:
        capture(optimizer)
    snapshots = []
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.full((3, 4), float(rank.rank + step))
        if step == 4:
            inputs[0, 0] = torch.inf
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        snapshots.append(
            snapshot([list(model.parameters()), list(optimizer.state.values()), scaler.get_scale()])
        )
    optim_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return {"trained": repr([snapshots, snapshot(optim_state)]), "how": str(explain(optimizer))}
