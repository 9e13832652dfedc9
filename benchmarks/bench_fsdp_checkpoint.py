"""Sharded checkpoints: what saving and loading a transformer of 21 million parameters, and its AdamW, takes."""

import functools
from typing import Any

from benchmarks import comparison, process_memory
from benchmarks.common import ranks
from benchmarks.timing import Workload

_DEVICES = ["cpu"]
_WHAT = ["model", "optimizer"]
_KINDS = ["FULL", "SHARDED"]  # of the first rank alone where it is saved; or each rank its rows
_RANKS = "benchmarks.checkpoint_ranks"


def _workload(call: str, subject: str, what: str, kind: str) -> Workload:
    given: dict[str, Any] = {"subject": subject, "what": what, "kind": kind, "deadline_s": 300}
    return Workload(
        functools.partial(ranks(2).run, f"{_RANKS}:{call}", **given),
        effect=lambda: ranks(2).run(f"{_RANKS}:first_values", loads=call == "load", **given)[0],
    )


def saving(subject: str, what: str, kind: str, device: str) -> Workload:
    return _workload("save", subject, what, kind)


def loading(subject: str, what: str, kind: str, device: str) -> Workload:
    return _workload("load", subject, what, kind)


class RatioFsdpSave(comparison.Ratio):
    title = "FSDP: saving the state of a transformer of 21 million parameters on two ranks"
    area, curve = "Checkpoints", "saving"
    params = [_WHAT, _KINDS, _DEVICES]
    param_names = ["what", "kind", "device"]
    is_one_off = True
    workload = staticmethod(saving)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFsdpLoad(comparison.Ratio):
    title = "FSDP: loading the state of a transformer of 21 million parameters on two ranks"
    area, curve = "Checkpoints", "loading"
    params = [_WHAT, _KINDS, _DEVICES]
    param_names = ["what", "kind", "device"]
    is_one_off = True
    workload = staticmethod(loading)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class FsdpSavePeak:
    """Most memory that the first rank takes to save a state, above what it holds before."""

    area, curve = "Peak memory", "while saving"
    params = [["impl", "torch", "FSDP2"], _WHAT, _KINDS]
    param_names = ["subject", "what", "kind"]
    version = "1"
    timeout = 600

    def track_bytes(self, subject, what, kind):
        return process_memory.asked_of_new_ranks(
            f"{_RANKS}:peak_bytes", 2, subject=subject, what=what, kind=kind
        )

    track_bytes.unit, track_bytes.type = "bytes", "memory"
    track_bytes.pretty_name = "FSDP: peak memory of a rank that saves"
