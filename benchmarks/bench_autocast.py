"""Entry and exit of autocast regions, which a model does thousands of times a second."""

from collections.abc import Callable
from typing import Any

from benchmarks import comparison
from benchmarks.common import DEVICES, SUBJECTS, member, require
from benchmarks.timing import Workload


def _plain(autocast: Any, device: str) -> Callable[[], None]:
    def call() -> None:
        with autocast(device):
            pass

    return call


def _disabled(autocast: Any, device: str) -> Callable[[], None]:
    def call() -> None:
        with autocast(device, enabled=False):
            pass

    return call


def _nested(autocast: Any, device: str) -> Callable[[], None]:
    def call() -> None:
        with autocast(device), autocast(device, enabled=False), autocast(device):
            pass

    return call


def _decorator(autocast: Any, device: str) -> Callable[[], None]:
    @autocast(device)
    def call() -> None:
        pass

    return call


REGIONS = {"plain": _plain, "disabled": _disabled, "nested": _nested, "decorator": _decorator}


def region(subject: str, kind: str, device: str) -> Workload:
    require(device)
    return Workload(REGIONS[kind](member(subject, "amp.autocast"), device))


class RatioRegion(comparison.Ratio):
    title = "autocast region"
    area = "autocast"
    params = [list(REGIONS), DEVICES]
    param_names = ["region", "device"]
    workload = staticmethod(region)

    def setup_cache(self):
        return self.measure_all()


class Region(comparison.Absolute):
    title = "autocast region"
    params = [SUBJECTS, list(REGIONS), DEVICES]
    param_names = ["subject", "region", "device"]
    workload = staticmethod(region)
    number = 100
