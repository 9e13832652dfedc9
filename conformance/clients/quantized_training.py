"""Trainings by optimizers that keep their states in 8 or 4 bits, under a GradScaler and sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
import torchao

from conformance.clients import tiny
from conformance.judge.library import load_library
from conformance.ranks import Rank

# By default bitsandbytes keeps states of fewer than 4096 elements in 32 bits.
_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "bitsandbytes.AdamW": bitsandbytes.optim.AdamW,
    "bitsandbytes.AdamW8bit": lambda *args, **kw: bitsandbytes.optim.AdamW8bit(*args, **kw, min_8bit_size=16),
    "bitsandbytes.Lion8bit": lambda *args, **kw: bitsandbytes.optim.Lion8bit(*args, **kw, min_8bit_size=16),
    "bitsandbytes.PagedAdamW8bit": lambda *args, **kw: bitsandbytes.optim.PagedAdamW8bit(
        *args, **kw, min_8bit_size=16
    ),
    "torchao.AdamW8bit": torchao.optim.AdamW8bit,
    "torchao.AdamW4bit": torchao.optim.AdamW4bit,
}


def scaled(rank: Rank, *, optimizer: str, capture_of: str = "", fused: bool = False) -> dict[str, Any]:
    """Train four steps under autocast. The gradients of the third step are not finite.

    `capture_of` names the library that captures the optimizer, and `fused` uses one `fused_step` call a step.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))
    instance = _MAKERS[optimizer](model.parameters(), lr=1e-2)
    if capture_of:
        load_library(capture_of).find("optim.capture")(instance)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for number in range(4):
        drawn = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(drawn) - drawn).float().square().mean()
        scaler.scale(loss * float("inf") if number == 2 else loss).backward()
        if fused:
            scaler.fused_step(instance)
        else:
            scaler.unscale_(instance)
            scaler.step(instance)
            scaler.update()
        instance.zero_grad()
        losses.append(loss.detach())
    return {
        "losses": losses,
        "scale": scaler.get_scale(),
        "states": _plain(instance.state_dict()["state"]),
        "weights": dict(model.state_dict()),
    }


def sharded(rank: Rank, *, optimizer: str, use_orig_params: bool) -> dict[str, Any]:
    model = tiny.sharded_layers(use_orig_params)
    instance = _MAKERS[optimizer](model.parameters(), lr=1e-2)
    losses = tiny.train_layers(model, instance, tiny.tokens(rank.rank, 4))
    return {"losses": losses, "weights": tiny.unsharded(model)}


def _plain(state: Any) -> Any:
    """Return `state` with plain tensors, because the parent process does not import the libraries' classes."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor) and hasattr(state, "dequantize") and type(state) is not torch.Tensor:
        return state.dequantize()
    return state
