"""Sharded training: what a unit costs beside its computation, and whole steps of a transformer on several ranks."""

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import comparison
from benchmarks.common import member
from benchmarks.timing import Workload

UNITS = 8
_DEVICES = ["cpu"]
_KEPT = ["flat", "original"]  # what `parameters()` are: `use_orig_params`


@functools.cache
def _group_of_eight() -> None:
    """Ranks that are not there: their collectives take no time."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 (registers the backend)

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())


def small_units(subject: str, parameters: int, kept: str, device: str) -> Workload:
    """Forward and backward of units that compute next to nothing."""
    _group_of_eight()
    torch.manual_seed(0)
    wrap = functools.partial(
        member(subject, "distributed.fsdp.FullyShardedDataParallel"),
        device_id=torch.device(device),
        use_orig_params=kept == "original",
    )
    units = [wrap(nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2)))) for _ in range(UNITS)]
    model = wrap(nn.Sequential(*units))
    data = torch.randn(2, 8)

    def call() -> None:
        model(data).sum().backward()

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    return Workload(call, clear)


def step(subject: str, world_size: int, kept: str, device: str) -> Workload:
    """A whole step with SGD, collectives over gloo."""
    pool = _ranks(world_size)
    given: dict[str, Any] = {"subject": subject, "use_orig_params": kept == "original", "deadline_s": 300}
    return Workload(
        functools.partial(pool.run, "benchmarks.fsdp_ranks:step", **given),
        effect=lambda: pool.run("benchmarks.fsdp_ranks:weights_after_a_step", **given)[0],
    )


@functools.cache
def _ranks(world_size: int) -> Any:
    from conformance.ranks import RankPool  # noqa: PLC0415 (brings what only the judge needs)

    return RankPool(world_size)


class RatioFsdpSmallUnits(comparison.Ratio):
    title = "FSDP: units that compute next to nothing"
    params = [[2, 8, 24], _KEPT, _DEVICES]
    param_names = ["parameters", "kept", "device"]
    workload = staticmethod(small_units)

    def setup_cache(self):
        with warnings.catch_warnings(action="ignore"):
            return self.measure_all()

    setup_cache.timeout = 600


class RatioFsdpStep(comparison.Ratio):
    title = "FSDP: a step of a transformer of 21 million parameters"
    params = [[1, 2, 4], _KEPT, _DEVICES]
    param_names = ["world_size", "kept", "device"]
    workload = staticmethod(step)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800
