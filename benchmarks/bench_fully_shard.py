"""fully_shard against torch's: the cost of a unit, whole steps, and what is done with its DTensors."""

import functools
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks import comparison
from benchmarks.bench_fsdp import UNITS, group_of_eight
from benchmarks.common import member, ranks
from benchmarks.timing import Workload

_DEVICES = ["cpu"]
_WORLDS = [1, 2]
_RANKS = "benchmarks.fully_shard_ranks"


def small_units(subject: str, parameters: int, device: str) -> Workload:
    """Forward and backward of units that compute next to nothing."""
    group_of_eight()
    torch.manual_seed(0)
    fully_shard = member(subject, "distributed.fsdp.fully_shard")
    units = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2))) for _ in range(UNITS)]
    model = fully_shard(nn.Sequential(*(fully_shard(unit) for unit in units)))
    data = torch.randn(2, 8, device=device)

    def call() -> None:
        model(data).sum().backward()

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    return Workload(call, clear)


def _on_ranks(call: str, effect: str, subject: str, world_size: int, device: str) -> Workload:
    given: dict[str, Any] = {"subject": subject, "deadline_s": 300}
    pool = ranks(world_size)
    return Workload(
        functools.partial(pool.run, f"{_RANKS}:{call}", **given),
        effect=lambda: pool.run(f"{_RANKS}:{effect}", **given)[0],
    )


class RatioFullyShardSmallUnits(comparison.Ratio):
    title = "fully_shard: units that compute next to nothing"
    area, curve = "FSDP: the cost of a unit", "fully_shard"
    params = [[2, 8, 24], _DEVICES]
    param_names = ["parameters", "device"]
    workload = staticmethod(small_units)

    def setup_cache(self):
        with warnings.catch_warnings(action="ignore"):
            return self.measure_all()

    setup_cache.timeout = 600


class RatioFullyShardStep(comparison.Ratio):
    title = "fully_shard: a step of a transformer of 21 million parameters"
    area, curve = "fully_shard step", "{world_size} ranks"
    params = [_WORLDS, _DEVICES]
    param_names = ["world_size", "device"]
    workload = staticmethod(functools.partial(_on_ranks, "step", "logits_after_a_step"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFullyShardClip(comparison.Ratio):
    title = "fully_shard: clip_grad_norm_ over the DTensors of the same transformer"
    area, curve = "Clipping", "of DTensors, {world_size} ranks"
    params = [_WORLDS, _DEVICES]
    param_names = ["world_size", "device"]
    workload = staticmethod(functools.partial(_on_ranks, "clip", "clip"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFullyShardWholeState(comparison.Ratio):
    title = "fully_shard: the whole state of the same transformer on every rank"
    area, curve = "Checkpoints", "of DTensors, {world_size} ranks"
    params = [_WORLDS, _DEVICES]
    param_names = ["world_size", "device"]
    is_one_off = True
    workload = staticmethod(functools.partial(_on_ranks, "save_whole", "save_whole"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800
