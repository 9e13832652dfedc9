"""Cases of the gate's byte-level GPT, trained sharded with the batch split over ranks, and unsharded in one process."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.distributed.fsdp.lab import Lab
from conformance.training.config import small_config
from conformance.training.corpus import load_corpus, windows
from conformance.training.gpt import BYTES, GPT, GPTBlock

CONFIG = small_config("bf16")
PARTS = 2  # parts of a batch in the unsharded run
WINDOWS = PARTS * CONFIG.batch  # windows in a batch, for any number of ranks


def train_sharded(lab: Lab, *, strategy: str, use_orig_params: bool, steps: int) -> list[float]:
    """Train. Return the loss over the whole batch before each step, in bits per byte."""
    optimizer = _shard(lab, use_orig_params, strategy)
    return _train(optimizer, _backward_of_ranks(lab), range(steps))


def begin(lab: Lab, *, use_orig_params: bool, steps: int, folder: str) -> list[float]:
    """Train the first steps and write a checkpoint. Return the losses."""
    optimizer = _shard(lab, use_orig_params)
    curve = _train(optimizer, _backward_of_ranks(lab), range(steps))
    dcp.save(_state(lab, optimizer), checkpoint_id=folder)
    return curve


def go_on(lab: Lab, *, use_orig_params: bool, steps: tuple[int, int], folder: str) -> list[float]:
    """Load the checkpoint on any number of ranks and train the next steps. Return the losses."""
    optimizer = _shard(lab, use_orig_params)
    _fill(optimizer)
    state = _state(lab, optimizer)
    dcp.load(state, checkpoint_id=folder)
    with _by_rows(lab):
        lab.model.load_state_dict(state["model"])
        moments = lab.fsdp.optim_state_dict_to_load(lab.model, optimizer, state["optimizer"])
    optimizer.load_state_dict(moments)
    return _train(optimizer, _backward_of_ranks(lab), range(*steps))


def _shard(lab: Lab, use_orig_params: bool, strategy: str = "FULL_SHARD") -> torch.optim.Optimizer:
    lab.model = lab.wrap(_model(), strategy=strategy, units=[GPTBlock], use_orig_params=use_orig_params)
    return _optimizer(lab.model)


def _backward_of_ranks(lab: Lab) -> Callable[[int], float]:
    def backward(step: int) -> float:
        loss = _loss(lab.model, _part(step, lab.rank.rank, lab.rank.world_size))
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / lab.rank.world_size

    return backward


def _by_rows(lab: Lab) -> contextlib.AbstractContextManager[None]:
    return lab.fsdp.state_dict_type(lab.model, lab.api.StateDictType.SHARDED_STATE_DICT)


def _state(lab: Lab, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with _by_rows(lab):
        optimizer_state = lab.fsdp.optim_state_dict(lab.model, optimizer)
        return {"model": lab.model.state_dict(), "optimizer": optimizer_state}


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's moments with a step that changes nothing, so that a checkpoint can be loaded into them."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@functools.cache
def train_unsharded(steps: int) -> list[float]:
    model = _model()

    def backward(step: int) -> float:
        losses = [_loss(model, _part(step, part, PARTS)) / PARTS for part in range(PARTS)]
        for loss in losses:
            loss.backward()
        return sum(float(loss.detach()) for loss in losses)

    return _train(_optimizer(model), backward, range(steps))


def _model() -> GPT:
    torch.manual_seed(CONFIG.seed)
    return GPT(CONFIG.shape)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=CONFIG.weight_decay)


def _train(optimizer: torch.optim.Optimizer, backward: Callable[[int], float], steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.learning_rate_at(step)
        losses.append(backward(step) / math.log(2))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _part(step: int, part: int, parts: int) -> Tensor:
    numel = WINDOWS // parts
    first = step * WINDOWS + part * numel
    drawn = range(first, first + numel)
    return windows(load_corpus().train, CONFIG.shape.context + 1, f"train {CONFIG.seed}", drawn)


def _loss(model: nn.Module, window_BT: Tensor) -> Tensor:
    logits = model(window_BT[:, :-1])
    return F.cross_entropy(logits.reshape(-1, BYTES), window_BT[:, 1:].flatten())
