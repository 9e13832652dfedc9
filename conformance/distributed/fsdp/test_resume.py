"""Sharded training that new processes continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from conformance.judge.clauses import clause
from conformance.judge.library import Library, load_library
from conformance.ranks import Rank, RankPool

STEPS, SAVED_AFTER = 6, 3
INF_AT = 1  # skipped step


class _Flat:
    """FullyShardedDataParallel and its calls for sharded checkpoints."""

    def __init__(self, library: Library, model: nn.Module, device: torch.device) -> None:
        self.sharded = library.find("distributed.fsdp.FullyShardedDataParallel")
        kind = library.find("distributed.fsdp.StateDictType").SHARDED_STATE_DICT
        self.model = self.sharded(model, device_id=device)
        self.sharded.set_state_dict_type(self.model, kind)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self.sharded.optim_state_dict(self.model, optimizer)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(self.sharded.optim_state_dict_to_load(self.model, optimizer, state))


class _PerParameter:
    """`fully_shard` and torch's calls for optimizer states of DTensors."""

    def __init__(self, library: Library, model: nn.Module, device: torch.device) -> None:
        self.model = library.find("distributed.fsdp.fully_shard")(model.to(device))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, optimizer)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, optimizer, state)


APIS = {"FullyShardedDataParallel": _Flat, "fully_shard": _PerParameter}


class _Training:
    def __init__(self, rank: Rank, library: str, api: str, seed: int) -> None:
        self.rank = rank
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))
        self.api = APIS[api](load_library(library), model, rank.device)
        self.optimizer = torch.optim.AdamW(self.api.model.parameters(), lr=0.05)
        scaler = load_library(library).find("distributed.fsdp.sharded_grad_scaler.ShardedGradScaler")
        self.scaler = scaler(rank.device.type, init_scale=2.0**10, growth_interval=2)

    def step(self, number: int) -> tuple[torch.Tensor, float]:
        """Return this rank's loss and the scale that follows."""
        generator = torch.Generator().manual_seed(10 * number + self.rank.rank)
        inputs = torch.randn(4, 5, generator=generator).to(self.rank.device)
        if number == INF_AT and self.rank.rank == 0:
            inputs[0] = torch.inf
        loss = self.api.model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach().cpu(), self.scaler.get_scale()

    def _sharded_state(self) -> dict[str, Any]:
        return {"model": self.api.model.state_dict(), "optimizer": self.api.optimizer_state(self.optimizer)}

    def _own_file(self, folder: str) -> Path:
        return Path(folder) / f"rank{self.rank.rank}.pt"

    def save(self, folder: str) -> None:
        dcp.save(self._sharded_state(), checkpoint_id=folder)
        random = [generators.get_rng_state() for generators in self._generators()]
        torch.save({"scaler": self.scaler.state_dict(), "random": random}, self._own_file(folder))

    def load(self, folder: str) -> None:
        self._create_optimizer_states()
        state = self._sharded_state()
        dcp.load(state, checkpoint_id=folder)
        self.api.model.load_state_dict(state["model"])
        self.api.load_optimizer(self.optimizer, state["optimizer"])
        own = torch.load(self._own_file(folder))
        self.scaler.load_state_dict(own["scaler"])
        for generators, random in zip(self._generators(), own["random"], strict=True):
            generators.set_rng_state(random)

    def _generators(self) -> list[Any]:
        on_cpu = self.rank.device.type == "cpu"
        return [torch] if on_cpu else [torch, torch.get_device_module(self.rank.device)]

    def _create_optimizer_states(self) -> None:
        """Take a step that changes no weight, because a checkpoint is read into states that exist."""
        (group,) = self.optimizer.param_groups
        rate, group["lr"] = group["lr"], 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        group["lr"] = rate

    def local_parameters(self) -> list[torch.Tensor]:
        locals_of = (
            getattr(parameter, "_local_tensor", parameter) for parameter in self.api.model.parameters()
        )
        return [local.detach().cpu().clone() for local in locals_of]


def train(
    rank: Rank,
    *,
    library: str,
    api: str,
    folder: str,
    steps: int,
    saves_after: int | None = None,
    first_step: int = 0,
) -> list[Any]:
    """Train from `first_step`, for which the checkpoint is loaded unless it is 0, to `steps`.

    Returns:
        loss and scale of each step, and at the end this rank's parameters.
    """
    training = _Training(rank, library, api, seed=1 + first_step)
    if first_step:
        training.load(folder)
    curve: list[Any] = []
    for number in range(first_step, steps):
        curve.append(training.step(number))
        if number + 1 == saves_after:
            training.save(folder)
    dist.barrier()
    return [*curve, training.local_parameters()]


@clause("distributed.fsdp.resume.new_processes")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.deadline(120)
def test_new_processes_continue_bit_for_bit(
    rank_pool: RankPool, subject: Library, world_size: int, device: str, tmp_path: Path, api: str
) -> None:
    def train_on(pool: RankPool, **options: Any) -> list[list[Any]]:
        return pool.run(
            train,
            library=subject.spec,
            api=api,
            folder=str(tmp_path),
            steps=STEPS,
            **options,
        )

    uninterrupted = train_on(rank_pool, saves_after=SAVED_AFTER)
    warm_up = ("conformance.ranks.process:load", {"library": subject.spec})
    with RankPool(world_size, device=device, warm_up=warm_up) as new_processes:
        resumed = train_on(new_processes, first_step=SAVED_AFTER)
    for expected, actual in zip(uninterrupted, resumed, strict=True):
        scales = [scale for _, scale in expected[:-1]]
        assert scales[INF_AT] < scales[0] < scales[-1], "the scale has to fall and grow"
        assert [scale for _, scale in actual[:-1]] == scales[SAVED_AFTER:]
        losses = [loss for loss, _ in expected[SAVED_AFTER:-1]]
        assert all(torch.equal(a, b) for a, (b, _) in zip(losses, actual[:-1], strict=True))
        assert len(set(map(float, losses))) == len(losses)
        assert all(torch.equal(a, b) for a, b in zip(expected[-1], actual[-1], strict=True))
