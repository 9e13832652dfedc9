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

from conformance.distributed.fsdp.scenes.optimizer_states import create_states
from conformance.distributed.fsdp.scenes.scaler_programs import SCALER
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import PlainTwins
from conformance.judge.clauses import clause
from conformance.ranks import RankPool

STEPS, SAVED_AFTER = 6, 3
INF_AT = 1  # skipped step


class _Training:
    """A sharded model with dropout, its optimizer, and a scaler. `api` is the name of the API that shards it."""

    def __init__(self, scene: Scene, api: str, seed: int) -> None:
        self.rank, self.fsdp = scene.rank, scene.fsdp if api == "FullyShardedDataParallel" else None
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))
        if self.fsdp:
            self.model = scene.wrap(model)
            self.fsdp.set_state_dict_type(self.model, scene.api.StateDictType.SHARDED_STATE_DICT)
        else:
            self.model = scene.shard(model.to(self.rank.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scaler = scene.library.find(SCALER)(self.rank.device.type, init_scale=2.0**10, growth_interval=2)

    def step(self, number: int) -> tuple[torch.Tensor, float]:
        """Return this rank's loss and the scale that follows."""
        generator = torch.Generator().manual_seed(10 * number + self.rank.rank)
        inputs = torch.randn(4, 5, generator=generator).to(self.rank.device)
        if number == INF_AT and self.rank.rank == 0:
            inputs[0] = torch.inf
        loss = self.model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach().cpu(), self.scaler.get_scale()

    def _sharded_state(self) -> dict[str, Any]:
        if self.fsdp:
            optimizer_state = self.fsdp.optim_state_dict(self.model, self.optimizer)
        else:
            optimizer_state = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optimizer": optimizer_state}

    def _own_file(self, folder: str) -> Path:
        return Path(folder) / f"rank{self.rank.rank}.pt"

    def save(self, folder: str) -> None:
        dcp.save(self._sharded_state(), checkpoint_id=folder)
        random = [generators.get_rng_state() for generators in self._generators()]
        torch.save({"scaler": self.scaler.state_dict(), "random": random}, self._own_file(folder))

    def load(self, folder: str) -> None:
        create_states(self.optimizer)
        state = self._sharded_state()
        dcp.load(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        if self.fsdp:
            states = self.fsdp.optim_state_dict_to_load(self.model, self.optimizer, state["optimizer"])
            self.optimizer.load_state_dict(states)
        else:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        own = torch.load(self._own_file(folder))
        self.scaler.load_state_dict(own["scaler"])
        for generators, random in zip(self._generators(), own["random"], strict=True):
            generators.set_rng_state(random)

    def _generators(self) -> list[Any]:
        on_cpu = self.rank.device.type == "cpu"
        return [torch] if on_cpu else [torch, torch.get_device_module(self.rank.device)]

    def local_parameters(self) -> list[torch.Tensor]:
        locals_of = (getattr(parameter, "_local_tensor", parameter) for parameter in self.model.parameters())
        return [local.detach().cpu().clone() for local in locals_of]


def train(
    scene: Scene, *, api: str, folder: str, saves_after: int | None = None, first_step: int = 0
) -> list[Any]:
    """Train from `first_step`, for which the checkpoint is loaded unless it is 0.

    Returns:
        loss and scale of each step, and at the end this rank's parameters.
    """
    training = _Training(scene, api, seed=1 + first_step)
    if first_step:
        training.load(folder)
    curve: list[Any] = []
    for number in range(first_step, STEPS):
        curve.append(training.step(number))
        if number + 1 == saves_after:
            training.save(folder)
    dist.barrier()
    return [*curve, training.local_parameters()]


@clause("distributed.fsdp.resume.new_processes")
@pytest.mark.parametrize("api", ["FullyShardedDataParallel", "fully_shard"])
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.deadline(120)
def test_new_processes_continue_bit_for_bit(
    plain_twins: PlainTwins, device: str, tmp_path: Path, api: str
) -> None:
    subject, where = plain_twins.subject, {"api": api, "folder": str(tmp_path)}
    uninterrupted = plain_twins.values(train, saves_after=SAVED_AFTER, **where)
    warm_up = ("conformance.ranks.process:load", {"library": subject.spec})
    with RankPool(plain_twins.world_size, device=device, warm_up=warm_up) as new_processes:
        resuming = PlainTwins(plain_twins.reference, subject, new_processes)
        resumed = resuming.values(train, first_step=SAVED_AFTER, **where)
    for expected, actual in zip(uninterrupted, resumed, strict=True):
        scales = [scale for _, scale in expected[:-1]]
        assert scales[INF_AT] < scales[0] < scales[-1], "the scale has to fall and grow"
        assert [scale for _, scale in actual[:-1]] == scales[SAVED_AFTER:]
        losses = [loss.values for loss, _ in expected[SAVED_AFTER:-1]]
        assert all(torch.equal(a, b.values) for a, (b, _) in zip(losses, actual[:-1], strict=True))
        assert len(set(map(float, losses))) == len(losses)
        pairs = zip(expected[-1], actual[-1], strict=True)
        assert all(torch.equal(before.values, after.values) for before, after in pairs)
