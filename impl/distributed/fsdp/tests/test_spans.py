"""A profile of a step names every unit in each of its phases."""

from __future__ import annotations

import re

from torch.profiler import ProfilerActivity, profile

from impl.distributed.fsdp.tests.streamed import PLAIN, call, loss_of, model_of, world_of

LABELS = (
    "FSDP::pre_forward",
    "FSDP::all_gather",
    "FullyShardedDataParallel.forward",
    "FSDP::post_forward",
    "FSDP::pre_backward",
    "FSDP::post_backward_reshard",
    "FSDP::post_backward_reduce",
)


def test_a_profile_names_every_unit_in_each_phase() -> None:
    with world_of(4):
        model = model_of()
        units = model.fsdp_modules(model)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            loss_of(call(model, PLAIN, PLAIN.batch(0, 0))).backward()
        found = [re.fullmatch(r"(.*) \((.*)\)", event.name) for event in profiled.events()]
        shown = {(one[1], one[2]) for one in found if one and one[1] in LABELS}
        named = [one._unit.name for one in units if one._has_params]
    assert len(set(named)) == len(named) > 2
    assert shown >= {(label, name) for label in LABELS for name in named}
