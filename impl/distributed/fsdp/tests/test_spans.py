"""A profile of a step names every unit in each of its phases."""

from __future__ import annotations

import re

from torch.profiler import ProfilerActivity, profile

from conformance.distributed.fsdp.test_scale import world_of
from impl.distributed.fsdp.tests.small_model import loss_of_batch, model_of

LABELS = (
    "FSDP::pre_forward",
    "FSDP::all_gather",
    "FullyShardedDataParallel.forward",
    "FSDP::post_forward",
    "FSDP::pre_backward",
    "FSDP::post_backward_reshard",
    "FSDP::post_backward_reduce",
)


def test_profile_names_every_unit_in_each_phase() -> None:
    with world_of(4):
        model = model_of()
        units = model.fsdp_modules(model)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            loss_of_batch(model).backward()
        matches = [re.fullmatch(r"(.*) \((.*)\)", event.name) for event in profiled.events()]
        shown = {(match[1], match[2]) for match in matches if match and match[1] in LABELS}
        named = [unit._unit.name for unit in units if unit._has_params]
    assert len(set(named)) == len(named) > 2
    assert shown >= {(label, name) for label in LABELS for name in named}
