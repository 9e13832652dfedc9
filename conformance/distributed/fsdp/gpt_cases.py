"""The byte-level GPT that the gate trains, dealt to ranks that have a part of each batch, and whole in one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.library import load_library
from conformance.ranks import Rank
from conformance.training.corpus import load_corpus, windows
from conformance.training.gpt import BYTES, GPT, Block
from conformance.training.plan import small_plan

PLAN = small_plan("bf16")
PARTS = 2  # of a batch, one for each rank


def train_sharded(
    rank: Rank, *, library: str, strategy: str, use_orig_params: bool, steps: int
) -> list[float]:
    """Bits a byte over the whole batch, before each step."""
    fsdp = load_library(library).distributed.fsdp
    model = fsdp.FullyShardedDataParallel(
        _model(),
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )

    def backward(step: int) -> float:
        loss = _loss(model, _part(step, rank.rank))
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / PARTS

    return _train(model, backward, steps)


@functools.cache
def train_whole(steps: int) -> list[float]:
    model = _model()

    def backward(step: int) -> float:
        losses = [_loss(model, _part(step, part)) / PARTS for part in range(PARTS)]
        for loss in losses:
            loss.backward()
        return sum(float(loss.detach()) for loss in losses)

    return _train(model, backward, steps)


def _model() -> GPT:
    torch.manual_seed(PLAN.seed)
    return GPT(PLAN.shape)


def _train(model: nn.Module, backward: Callable[[int], float], steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=PLAN.weight_decay)
    losses: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PLAN.learning_rate_at(step)
        losses.append(backward(step) / math.log(2))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _part(step: int, part: int) -> Tensor:
    first = (step * PARTS + part) * PLAN.batch
    drawn = range(first, first + PLAN.batch)
    return windows(load_corpus().train, PLAN.shape.context + 1, f"train {PLAN.seed}", drawn)


def _loss(model: nn.Module, window_BT: Tensor) -> Tensor:
    logits = model(window_BT[:, :-1])
    return F.cross_entropy(logits.reshape(-1, BYTES), window_BT[:, 1:].flatten())
