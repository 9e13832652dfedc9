"""Base classes of the benchmarks: the ratio of impl to torch, and absolute times. asv finds subclasses by name."""

import abc
import dataclasses
import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import shapes_of
from benchmarks.timing import FULL, Effort, Paired, Workload, by_turns, paired


def _name_methods(kind: Any) -> None:
    """Copy the methods into the class with readable names, because asv reads the names from the functions."""
    for name, method in inspect.getmembers(kind, lambda member: hasattr(member, "label")):
        own = types.FunctionType(
            method.__code__, method.__globals__, name, method.__defaults__, method.__closure__
        )
        vars(own).update(vars(method), pretty_name=f"{getattr(kind, 'title', kind.__name__)}: {method.label}")
        setattr(kind, name, own)


class Ratio(abc.ABC):
    """Ratio impl ÷ torch for each case of `params`, measured alternately in one process, with its noise.

    asv runs `setup_cache` once for all benchmarks that define it on the same line of the same file. So each subclass
    must define its own (`return self.measure_all()`). An inherited one would run for one class only.
    """

    title: str  # name on the dashboard
    area: str  # picture on the dashboard's first page
    # Name of the curve if the area has several. It may contain parameters in braces.
    curve = ""
    params: list[list[Any]]
    param_names: list[str]
    # Raise the version if the meaning of the numbers changes, and asv begins a new series.
    version = "1"
    is_one_off = False  # work that a program does once (see decision)

    @staticmethod
    @abc.abstractmethod
    def workload(subject: str, *case: Any) -> Workload: ...

    def __init_subclass__(cls) -> None:
        _name_methods(cls)

    def setup(self, measured: dict[tuple[Any, ...], Paired | Exception], *case: Any) -> None:
        if isinstance(result := measured[case], Exception):
            raise result

    def track_ratio_vs_torch(self, measured: dict[tuple[Any, ...], Paired], *case: Any) -> float:
        return measured[case].ratio

    track_ratio_vs_torch.unit = "× torch (lower is better)"
    track_ratio_vs_torch.label = "ratio to torch"

    def track_noise(self, measured: dict[tuple[Any, ...], Paired], *case: Any) -> float:
        return measured[case].noise

    track_noise.unit = "of the ratio"
    track_noise.label = "spread of the ratio"

    def track_seconds(self, measured: dict[tuple[Any, ...], Paired], *case: Any) -> float:
        return measured[case].subject_s

    track_seconds.unit = "seconds"
    track_seconds.label = "seconds of a call"

    def track_seconds_of_torch(self, measured: dict[tuple[Any, ...], Paired], *case: Any) -> float:
        return measured[case].reference_s

    track_seconds_of_torch.unit = "seconds"
    track_seconds_of_torch.label = "seconds of torch's call"

    @classmethod
    def measure(cls, case: tuple[Any, ...], effort: Effort, subject: str = "impl") -> Paired:
        device = dict(zip(cls.param_names, case, strict=True))["device"]
        return paired(cls.workload(subject, *case), cls.workload("torch", *case), device, effort)

    @classmethod
    def measure_all(cls) -> dict[tuple[Any, ...], Paired | Exception]:
        return {
            case: _or_error(functools.partial(cls.measure, case, FULL))
            for case in itertools.product(*cls.params)
        }


class BriefRatio(Ratio):
    """A ratio of few pairs, because a curve over many sizes is worth no more time."""

    @classmethod
    def measure(cls, case: tuple[Any, ...], effort: Effort, subject: str = "impl") -> Paired:
        brief = dataclasses.replace(
            effort, pairs=min(effort.pairs, 30), least_pairs=5, budget_s=min(effort.budget_s, 1.0), looks=()
        )
        return super().measure(case, brief, subject)


class MemoryBound(Ratio):
    """A ratio whose call is limited by memory. The call is also compared with a plain copy of the list.

    A copy does nothing but move bytes, so little is left to gain near its bandwidth. A call that only reads may exceed
    it.
    """

    passes: int  # reads plus writes of each element of the list

    @classmethod
    def measure(cls, case: tuple[Any, ...], effort: Effort, subject: str = "impl") -> Paired:
        values = dict(zip(cls.param_names, case, strict=True))
        works = [cls.workload(owner, *case) for owner in (subject, "torch")]
        copy = _copy_of(values["shapes"], values.get("dtype", "float32"), values["device"])
        to_torch, to_copy = by_turns(works[0], [works[1], copy], values["device"], effort)
        return dataclasses.replace(to_torch, share_of_copy=cls.passes / 2 / to_copy.ratio)

    def track_share_of_copy(self, measured: dict[tuple[Any, ...], Paired], *case: Any) -> float | None:
        return measured[case].share_of_copy

    track_share_of_copy.unit = "of a copy's bandwidth (higher is better)"
    track_share_of_copy.label = "share of a copy's bandwidth"


def _copy_of(shapes: str, dtype: str, device: str) -> Workload:
    """Return a plain copy of as many bytes as the tensors of a list have."""
    elements = sum(map(math.prod, shapes_of(shapes)))
    source = torch.ones(elements, dtype=getattr(torch, dtype), device=device)
    return Workload(functools.partial(torch.empty_like(source).copy_, source))


class Absolute(abc.ABC):
    """Seconds of one call. The subject is the first of `params`."""

    title: str
    params: list[list[Any]]
    param_names: list[str]
    version = "1"
    # A call may need restored inputs, and asv runs `setup` once a sample.
    number = 1
    repeat = (10, 50, 2.0)
    rounds = 2
    warmup_time = 0.2

    @staticmethod
    @abc.abstractmethod
    def workload(subject: str, *case: Any) -> Workload: ...

    def __init_subclass__(cls) -> None:
        _name_methods(cls)

    def setup(self, *case: Any) -> None:
        self.work = _remembered(type(self), case)
        self.synchronize = _synchronizer(case)
        if self.work.prepare is not None:
            self.work.prepare()
        self.synchronize()

    def time_call(self, *_: Any) -> None:
        self.work.call()
        self.synchronize()

    time_call.label = "one call"


def _or_error(measure: Callable[[], Paired]) -> Paired | Exception:
    try:
        return measure()
    except NotImplementedError as missing:
        return NotImplementedError(str(missing))
    except Exception as error:  # the other cases are still measured
        return RuntimeError(f"{type(error).__name__}: {error}")


@functools.lru_cache(maxsize=1)
def _remembered(benchmark: type[Absolute], case: tuple[Any, ...]) -> Workload:
    return benchmark.workload(*case)


def _synchronizer(case: tuple[Any, ...]) -> Callable[[], object]:
    if "cuda" not in case:
        return lambda: None
    return torch.cuda.synchronize
