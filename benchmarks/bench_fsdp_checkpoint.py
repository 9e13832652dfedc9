"""Sharded checkpoints: time and memory to save and load a transformer with 21 million parameters and its AdamW."""

import functools
from typing import Any

from benchmarks import comparison, process_memory
from benchmarks.common import ranks
from benchmarks.timing import Workload

_DEVICES = ["cpu"]
_OBJECTS = ["model", "optimizer"]
# FULL saves a full state on the first rank, SHARDED the rows of each rank.
_KINDS = ["FULL", "SHARDED"]
_RANKS = "benchmarks.checkpoint_ranks"


def _workload(call: str, subject: str, saved_object: str, kind: str) -> Workload:
    arguments: dict[str, Any] = {
        "subject": subject,
        "saved_object": saved_object,
        "kind": kind,
        "deadline_s": 300,
    }
    return Workload(
        functools.partial(ranks(2).run, f"{_RANKS}:{call}", **arguments),
        effect=lambda: ranks(2).run(f"{_RANKS}:first_values", loads=call == "load", **arguments)[0],
    )


def saving(subject: str, saved_object: str, kind: str, device: str) -> Workload:
    return _workload("save", subject, saved_object, kind)


def loading(subject: str, saved_object: str, kind: str, device: str) -> Workload:
    return _workload("load", subject, saved_object, kind)


class RatioFsdpSave(comparison.Ratio):
    title = "FSDP: saving the state of a transformer with 21 million parameters on two ranks"
    area, curve = "Checkpoints", "saving"
    params = [_OBJECTS, _KINDS, _DEVICES]
    param_names = ["what", "kind", "device"]
    is_one_off = True
    workload = staticmethod(saving)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class RatioFsdpLoad(comparison.Ratio):
    title = "FSDP: loading the state of a transformer with 21 million parameters on two ranks"
    area, curve = "Checkpoints", "loading"
    params = [_OBJECTS, _KINDS, _DEVICES]
    param_names = ["what", "kind", "device"]
    is_one_off = True
    workload = staticmethod(loading)

    def setup_cache(self):
        return self.measure_all()

    setup_cache.timeout = 1_800


class FsdpSavePeak:
    """Peak memory of the first rank while it saves a state, above its memory before."""

    area, curve = "Peak memory", "while saving"
    params = [["impl", "torch", "FSDP2"], _OBJECTS, _KINDS]
    param_names = ["subject", "what", "kind"]
    version = "1"
    timeout = 600

    def track_bytes(self, subject, saved_object, kind):
        return process_memory.run_on_new_ranks(
            f"{_RANKS}:peak_bytes", 2, subject=subject, saved_object=saved_object, kind=kind
        )

    track_bytes.unit, track_bytes.type = "bytes", "memory"
    track_bytes.pretty_name = "FSDP: peak memory of a rank that saves"
