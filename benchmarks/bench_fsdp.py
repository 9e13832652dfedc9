"""Sharded training: what a unit costs beside its computation, and whole steps of a transformer on several ranks."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import comparison, process_memory
from benchmarks.common import member, ranks
from benchmarks.timing import Effort, Paired, Workload, by_turns

UNITS = 8
_DEVICES = ["cpu"]
_PEERS = ["FSDP2", "DDP"]
_WAYS = ["impl", "torch", *_PEERS]
_KEPT = ["flat", "original"]  # what `parameters()` are: `use_orig_params`


@functools.cache
def group_of_eight() -> None:
    """Ranks that are not there: their collectives take no time."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 (registers the backend)

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())


def small_units(subject: str, parameters: int, kept: str, device: str) -> Workload:
    """Forward and backward of units that compute next to nothing."""
    group_of_eight()
    torch.manual_seed(0)
    wrap = functools.partial(
        member(subject, "distributed.fsdp.FullyShardedDataParallel"),
        device_id=torch.device(device),
        use_orig_params=kept == "original",
    )
    return forward_and_backward(wrap, parameters, device)


def forward_and_backward(wrap: Callable[[nn.Module], nn.Module], parameters: int, device: str) -> Workload:
    """Of a model of units in a unit, each made by `wrap`."""
    units = [wrap(nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2)))) for _ in range(UNITS)]
    model = wrap(nn.Sequential(*units))
    data = torch.randn(2, 8, device=device)

    def call() -> None:
        model(data).sum().backward()

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    return Workload(call, clear)


def step(subject: str, world_size: int, kept: str, device: str) -> Workload:
    """A whole step with SGD, collectives over gloo."""
    pool = ranks(world_size)
    given: dict[str, Any] = {"subject": subject, "use_orig_params": kept == "original", "deadline_s": 300}
    return Workload(
        functools.partial(pool.run, "benchmarks.fsdp_ranks:step", **given),
        effect=lambda: pool.run("benchmarks.fsdp_ranks:logits_after_a_step", **given)[0],
    )


@functools.cache
def _steps_by_turns(subject: str, world_size: int, effort: Effort) -> dict[str, Paired]:
    """With parameters as they were, by what it was timed against: so it need not be timed anew beside each."""
    others = ["torch", *(_PEERS if world_size > 1 else [])]
    own, *theirs = (step(one, world_size, "original", "cpu") for one in (subject, *others))
    return dict(zip(others, by_turns(own, theirs, effort=effort), strict=True))


def wrapping(subject: str, parameters: int, kept: str, device: str) -> Workload:
    """A module in the middle of a world of ranks that are not there: what is dealt is cut out, nothing is sent."""
    group_of_eight()
    make = functools.partial(
        member(subject, "distributed.fsdp.FullyShardedDataParallel"),
        device_id=torch.device(device),
        auto_wrap_policy=member(subject, "distributed.fsdp.wrap.ModuleWrapPolicy")({nn.Sequential}),
        use_orig_params=kept == "original",
    )
    ready: list[nn.Module] = []

    def prepare() -> None:
        torch.manual_seed(0)
        parts = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(parameters // 2))) for _ in range(UNITS)]
        ready[:] = [nn.ModuleList(parts)]

    return Workload(lambda: make(ready.pop()), prepare)


class RatioFsdpSmallUnits(comparison.Ratio):
    title = "FSDP: units that compute next to nothing"
    area = "FSDP: the cost of a unit"
    params = [[2, 8, 24], _KEPT, _DEVICES]
    param_names = ["parameters", "kept", "device"]
    workload = staticmethod(small_units)

    def setup_cache(self):
        with warnings.catch_warnings(action="ignore"):
            return self.measure_all()

    setup_cache.timeout = 600


class RatioFsdpStep(comparison.Ratio):
    title = "FSDP: a step of a transformer of 21 million parameters"
    area, curve = "FSDP step", "{world_size} ranks"
    params = [[1, 2, 4], _KEPT, _DEVICES]
    param_names = ["world_size", "kept", "device"]
    workload = staticmethod(step)

    @classmethod
    def measure(cls, case: tuple[Any, ...], effort: Effort, subject: str = "impl") -> Paired:
        world_size, kept, _ = case
        if kept == "original":
            return _steps_by_turns(subject, world_size, effort)["torch"]
        return super().measure(case, effort, subject)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFsdpStepToPeers(comparison.Ratio):
    title = "FSDP: a step of the same transformer, against torch's other ways"
    area, curve = "FSDP step against torch's other ways", "{peer}"
    params = [[2, 4], _PEERS, _DEVICES]
    param_names = ["world_size", "peer", "device"]

    @staticmethod
    def workload(subject: str, *case: Any) -> Workload:
        raise NotImplementedError("the subject and its peers are timed by turns, see measure")

    @classmethod
    def measure(cls, case: tuple[Any, ...], effort: Effort, subject: str = "impl") -> Paired:
        world_size, peer, _ = case
        return _steps_by_turns(subject, world_size, effort)[peer]

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFsdpWrap(comparison.Ratio):
    title = "FSDP: wrapping"
    area, curve = "Once a run", "wrapping"
    params = [[2, 24], _KEPT, _DEVICES]
    param_names = ["parameters", "kept", "device"]
    is_one_off = True
    workload = staticmethod(wrapping)

    def setup_cache(self):
        with warnings.catch_warnings(action="ignore"):
            return self.measure_all()

    setup_cache.timeout = 600


class FsdpPeak:
    """Most memory that the first rank takes in a step, above what it takes without a model."""

    area, curve = "Peak memory", "in a step"
    params = [_WAYS, [2, 4]]
    param_names = ["subject", "world_size"]
    version = "1"
    timeout = 600

    def track_bytes(self, subject, world_size):
        return _asked_once("peak_bytes", subject, world_size)

    track_bytes.unit, track_bytes.type = "bytes", "memory"
    track_bytes.pretty_name = "FSDP: peak memory of a rank in a step"


class FsdpTraffic:
    """Bytes that the ranks give to collectives in a step, all together.

    What ranks of one host read of one another's memory, as impl's do where Linux lets them, is not among them.
    """

    area, curve = "Bytes through collectives", "{world_size} ranks"
    params = [_WAYS, [2, 4]]
    param_names = ["subject", "world_size"]
    version = "2"
    timeout = 600

    def track_bytes(self, subject, world_size):
        return _asked_once("bytes_sent", subject, world_size)

    track_bytes.unit, track_bytes.type = "bytes", "memory"
    track_bytes.pretty_name = "FSDP: bytes through collectives in a step"


def _asked_once(what: str, subject: str, world_size: int) -> int:
    return process_memory.asked_of_new_ranks(
        f"benchmarks.fsdp_ranks:{what}", world_size, subject=subject, use_orig_params=True
    )
