"""Trainings by torch's pipeline schedules. Every rank has all stages, which are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from conformance.clients import tiny
from conformance.ranks import Rank


def train(rank: Rank, *, schedule: str, reshards: bool) -> dict[str, Any]:
    """Train with four microbatches, whose gradients are reduced together."""
    mesh = rank.mesh(rank.world_size, 1, names=("data", "pipeline"))
    layers, make = tiny.layers(), getattr(pipelining, schedule)
    is_single = issubclass(make, PipelineScheduleSingle)
    models = [layers] if is_single else [layers[:2], layers[2:]]
    for module in (*layers[1:3], *models):
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=reshards)
    stages = [
        pipelining.PipelineStage(
            model, number, len(models), torch.device("cpu"), group=mesh.get_group("pipeline")
        )
        for number, model in enumerate(models)
    ]
    run = make(stages[0] if is_single else stages, n_microbatches=4, loss_fn=_loss_of)
    optimizer = torch.optim.AdamW(layers.parameters(), **tiny.ADAM)
    losses: list[torch.Tensor] = []
    gradients = []
    for batch in tiny.tokens(rank.rank, 3):
        run.step(batch, target=batch, losses=losses)
        gradients.append(tiny.gathered({name: p.grad for name, p in layers.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "sharded": all(isinstance(model, FSDPModule) for model in models),
        "losses": [loss.detach() for loss in losses],
        "gradients": gradients,
        "weights": tiny.gathered(dict(layers.named_parameters())),
    }


def _loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
