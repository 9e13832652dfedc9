"""fully_shard against torch's: the overhead of a unit, full steps, clipping and checkpoints of its DTensors."""

import functools
import warnings
from typing import Any

import torch

from benchmarks import bench_fsdp, comparison, process_memory
from benchmarks.bench_fsdp import forward_and_backward, group_of_eight
from benchmarks.common import member, ranks
from benchmarks.timing import Workload

_DEVICES = ["cpu"]
_WORLDS = [1, 2, 4]
_RANKS = "benchmarks.fully_shard_ranks"


def small_units(subject: str, parameters: int, device: str) -> Workload:
    """Return forward and backward of units with almost no computation."""
    group_of_eight()
    torch.manual_seed(0)
    return forward_and_backward(member(subject, "distributed.fsdp.fully_shard"), parameters, device)


def step(subject: str, against: str, world_size: int, device: str) -> Workload:
    """Return a step of impl's fully_shard, or of FSDP1 if the subject is torch."""
    if subject == "torch":
        return bench_fsdp.step(subject, world_size, "original", device)
    return _on_ranks("step", "logits_after_a_step", subject, world_size, device)


def own_shards(subject: str, shards: str, world_size: int, device: str) -> Workload:
    return _on_ranks(shards, shards, subject, world_size, device)


def _on_ranks(call: str, effect: str, subject: str, world_size: int, device: str) -> Workload:
    arguments: dict[str, Any] = {"subject": subject, "deadline_s": 300}
    pool = ranks(world_size)
    return Workload(
        functools.partial(pool.run, f"{_RANKS}:{call}", **arguments),
        effect=lambda: pool.run(f"{_RANKS}:{effect}", **arguments)[0],
    )


class RatioFullyShardSmallUnits(comparison.Ratio):
    title = "fully_shard: units with almost no computation"
    area, curve = "FSDP: overhead of a unit", "fully_shard"
    params = [[2, 8, 24], _DEVICES]
    param_names = ["parameters", "device"]
    workload = staticmethod(small_units)

    def setup_cache(self):
        with warnings.catch_warnings(action="ignore"):
            return self.measure_all()

    setup_cache.timeout = 600


class RatioFullyShardStep(comparison.Ratio):
    title = "fully_shard: step of a transformer with 21 million parameters"
    area, curve = "fully_shard step", "{world_size} ranks"
    params = [_WORLDS, _DEVICES]
    param_names = ["world_size", "device"]
    workload = staticmethod(functools.partial(_on_ranks, "step", "logits_after_a_step"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFullyShardStepToFsdp1(comparison.Ratio):
    title = "fully_shard: step of the same transformer, against torch's FSDP1"
    area, curve = "FSDP step against other APIs of torch", "fully_shard against {against}"
    params = [["FSDP1"], [2, 4], _DEVICES]
    param_names = ["against", "world_size", "device"]
    workload = staticmethod(step)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFullyShardClip(comparison.Ratio):
    title = "fully_shard: clip_grad_norm_ on the DTensors of the same transformer"
    area, curve = "Clipping", "of DTensors, {world_size} ranks"
    params = [_WORLDS, _DEVICES]
    param_names = ["world_size", "device"]
    workload = staticmethod(functools.partial(_on_ranks, "clip", "clip"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFullyShardOwnState(comparison.Ratio):
    title = "fully_shard: state_dict and load_state_dict of each rank's rows of the same transformer"
    area, curve = "Checkpoints", "rows of DTensors, {shards}"
    params = [["saved", "loaded"], _WORLDS, _DEVICES]
    param_names = ["shards", "world_size", "device"]
    is_one_off = True
    workload = staticmethod(own_shards)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFullyShardWholeState(comparison.Ratio):
    title = "fully_shard: full state dict of the same transformer on every rank"
    area, curve = "Checkpoints", "of DTensors, {world_size} ranks"
    params = [_WORLDS, _DEVICES]
    param_names = ["world_size", "device"]
    is_one_off = True
    workload = staticmethod(functools.partial(_on_ranks, "save_full_state", "save_full_state"))

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class FullyShardPeak:
    """Peak memory of the first rank in a step, above its memory without a model."""

    area, curve = "Peak memory", "in a step of fully_shard"
    params = [["impl", "torch"], [2, 4]]
    param_names = ["subject", "world_size"]
    version = "1"
    timeout = 600

    def track_bytes(self, subject, world_size):
        return process_memory.run_on_new_ranks(f"{_RANKS}:peak_bytes", world_size, subject=subject)

    track_bytes.unit, track_bytes.type = "bytes", "memory"
    track_bytes.pretty_name = "fully_shard: peak memory of a rank in a step"
