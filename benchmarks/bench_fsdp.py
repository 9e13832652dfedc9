"""Sharded training: the overhead of a unit, and full steps of a transformer on several ranks."""

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
_SUBJECTS = ["impl", "torch", *_PEERS]
# The type of `parameters()`: flat, or original with `use_orig_params`.
_PARAM_TYPES = ["flat", "original"]


@functools.cache
def group_of_eight() -> None:
    """Initialise a fake group of eight ranks, whose collectives take no time."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 (registers the backend)

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())


def small_units(subject: str, parameters: int, param_type: str, device: str) -> Workload:
    """Return forward and backward of units with almost no computation."""
    group_of_eight()
    torch.manual_seed(0)
    wrap = functools.partial(
        member(subject, "distributed.fsdp.FullyShardedDataParallel"),
        device_id=torch.device(device),
        use_orig_params=param_type == "original",
    )
    return forward_and_backward(wrap, parameters, device)


def forward_and_backward(wrap: Callable[[nn.Module], nn.Module], parameters: int, device: str) -> Workload:
    """Return forward and backward of a model of `UNITS` nested units that `wrap` creates."""
    units = [wrap(nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2)))) for _ in range(UNITS)]
    model = wrap(nn.Sequential(*units))
    data = torch.randn(2, 8, device=device)

    def call() -> None:
        model(data).sum().backward()

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    return Workload(call, clear)


def step(subject: str, world_size: int, param_type: str, device: str) -> Workload:
    """Return a full step with SGD, with collectives over gloo."""
    pool = ranks(world_size)
    arguments: dict[str, Any] = {
        "subject": subject,
        "use_orig_params": param_type == "original",
        "deadline_s": 300,
    }
    return Workload(
        functools.partial(pool.run, "benchmarks.fsdp_ranks:step", **arguments),
        effect=lambda: pool.run("benchmarks.fsdp_ranks:logits_after_a_step", **arguments)[0],
    )


@functools.cache
def _steps_by_turns(subject: str, world_size: int, effort: Effort) -> dict[str, Paired]:
    """Time the step with original parameters against all references at once. Return the results by reference."""
    names = ["torch", *(_PEERS if world_size > 1 else [])]
    own, *references = (step(name, world_size, "original", "cpu") for name in (subject, *names))
    return dict(zip(names, by_turns(own, references, effort=effort), strict=True))


def wrapping(subject: str, parameters: int, param_type: str, device: str) -> Workload:
    """Return the wrapping of a module in a fake group: parameters are sharded and nothing is sent."""
    group_of_eight()
    make = functools.partial(
        member(subject, "distributed.fsdp.FullyShardedDataParallel"),
        device_id=torch.device(device),
        auto_wrap_policy=member(subject, "distributed.fsdp.wrap.ModuleWrapPolicy")({nn.Sequential}),
        use_orig_params=param_type == "original",
    )
    ready: list[nn.Module] = []

    def prepare() -> None:
        torch.manual_seed(0)
        units = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(parameters // 2))) for _ in range(UNITS)]
        ready[:] = [nn.ModuleList(units)]

    return Workload(lambda: make(ready.pop()), prepare)


class RatioFsdpSmallUnits(comparison.Ratio):
    title = "FSDP: units with almost no computation"
    area = "FSDP: overhead of a unit"
    params = [[2, 8, 24], _PARAM_TYPES, _DEVICES]
    param_names = ["parameters", "kept", "device"]
    workload = staticmethod(small_units)

    def setup_cache(self):
        with warnings.catch_warnings(action="ignore"):
            return self.measure_all()

    setup_cache.timeout = 600


class RatioFsdpStep(comparison.Ratio):
    title = "FSDP: step of a transformer with 21 million parameters"
    area, curve = "FSDP step", "{world_size} ranks"
    params = [[1, 2, 4], _PARAM_TYPES, _DEVICES]
    param_names = ["world_size", "kept", "device"]
    workload = staticmethod(step)

    @classmethod
    def measure(cls, case: tuple[Any, ...], effort: Effort, subject: str = "impl") -> Paired:
        world_size, param_type, _ = case
        if param_type == "original":
            return _steps_by_turns(subject, world_size, effort)["torch"]
        return super().measure(case, effort, subject)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFsdpStepToPeers(comparison.Ratio):
    title = "FSDP: step of the same transformer, against other APIs of torch"
    area, curve = "FSDP step against other APIs of torch", "{peer}"
    params = [[2, 4], _PEERS, _DEVICES]
    param_names = ["world_size", "peer", "device"]

    @staticmethod
    def workload(subject: str, *case: Any) -> Workload:
        raise NotImplementedError("the subject and its peers are timed together, see measure")

    @classmethod
    def measure(cls, case: tuple[Any, ...], effort: Effort, subject: str = "impl") -> Paired:
        world_size, peer, _ = case
        return _steps_by_turns(subject, world_size, effort)[peer]

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFsdpWrap(comparison.Ratio):
    title = "FSDP: wrapping"
    area, curve = "One-off work", "wrapping"
    params = [[2, 24], _PARAM_TYPES, _DEVICES]
    param_names = ["parameters", "kept", "device"]
    is_one_off = True
    workload = staticmethod(wrapping)

    def setup_cache(self):
        with warnings.catch_warnings(action="ignore"):
            return self.measure_all()

    setup_cache.timeout = 600


class FsdpPeak:
    """Peak memory of the first rank in a step, above its memory without a model."""

    area, curve = "Peak memory", "in a step"
    params = [_SUBJECTS, [2, 4]]
    param_names = ["subject", "world_size"]
    version = "1"
    timeout = 600

    def track_bytes(self, subject, world_size):
        return _measure_once("peak_bytes", subject, world_size)

    track_bytes.unit, track_bytes.type = "bytes", "memory"
    track_bytes.pretty_name = "FSDP: peak memory of a rank in a step"


class FsdpTraffic:
    """Bytes that all ranks together send through collectives in a step.

    They do not include reads of another rank's memory on the same host, as impl does where Linux permits it.
    """

    area, curve = "Bytes through collectives", "{world_size} ranks"
    params = [_SUBJECTS, [2, 4]]
    param_names = ["subject", "world_size"]
    version = "2"
    timeout = 600

    def track_bytes(self, subject, world_size):
        return _measure_once("bytes_sent", subject, world_size)

    track_bytes.unit, track_bytes.type = "bytes", "memory"
    track_bytes.pretty_name = "FSDP: bytes through collectives in a step"


def _measure_once(function: str, subject: str, world_size: int) -> int:
    return process_memory.run_on_new_ranks(
        f"benchmarks.fsdp_ranks:{function}", world_size, subject=subject, use_orig_params=True
    )
