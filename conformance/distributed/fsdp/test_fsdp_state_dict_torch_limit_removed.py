"""State dicts that torch loses, moves unnecessarily or cannot load: deviations, asserted for both libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import state_dict_cases as cases
from conformance.distributed.fsdp import state_dict_hook_cases as hook_cases
from conformance.distributed.fsdp import state_dict_memory_cases as memory_cases
from conformance.distributed.fsdp.fsdp_cases import Setup
from conformance.distributed.fsdp.lab import TREE, Program
from conformance.distributed.fsdp.optim_state_cases import StateDictMethod
from conformance.distributed.fsdp.state_dict_cases import Form
from conformance.distributed.fsdp.twins import (
    FLAT,
    ORIGINALS,
    Seen,
    Twins,
    TwinsOf,
    both_kinds,
    each,
    flat_or_originals,
    leaf_by_leaf,
    raises,
    values_of,
)
from conformance.judge.clauses import clause

MESH, GROUP = Setup(wrap="leaves", ranks="mesh"), Setup(wrap="leaves", ranks="group")
each_kind = pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
more_worlds = pytest.mark.world_sizes(also=[3])
has_changed, is_as_before = each(lambda one: one["changed"]), each(lambda one: not one["changed"])


def refused_for(rank: int) -> Callable[[Seen], bool]:
    """Return whether all other ranks report that this rank could not load, and no rank changed anything."""

    def do(seen: Seen) -> bool:
        reported = [f"rank {rank} could not load" in str(one["error"]) for one in values_of(seen)]
        return is_as_before(seen) and reported == [number != rank for number in range(len(seen))]

    return do


all_or_nothing = clause("distributed.fsdp.fsdp_state_dict.all_or_nothing")
fails_on_one_rank = pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")


@all_or_nothing
@fails_on_one_rank
@pytest.mark.parametrize("fault", ["missing", "misshaped", "without values"])
@flat_or_originals
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_a_load_that_fails_on_one_rank(cpu_twins: Twins, setup: Setup, fault: str) -> None:
    asked = {"form": Form(), "fault": fault, "on": [1]}
    cpu_twins.deviate(cases.failed, setup, **asked, torch_does=has_changed, we_do=refused_for(1))


@all_or_nothing
@fails_on_one_rank
def test_a_load_that_fails_on_all_ranks(cpu_twins: Twins) -> None:
    asked = {"form": Form("SHARDED"), "fault": "missing", "on": range(cpu_twins.world_size)}
    cpu_twins.deviate(cases.failed, FLAT, **asked, torch_does=has_changed, we_do=is_as_before)


@all_or_nothing
@fails_on_one_rank
@pytest.mark.parametrize("kind", ["SHARDED", "LOCAL"])
@pytest.mark.parametrize("fault", ["missing buffer", "misshaped buffer"])
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_parts_are_loaded_by_all_or_by_none(cpu_twins: Twins, kind: str, fault: str) -> None:
    last = cpu_twins.world_size - 1
    asked = {"form": Form(kind), "fault": fault, "on": [last]}
    cpu_twins.deviate(cases.failed, FLAT, **asked, torch_does=has_changed, we_do=refused_for(last))


@all_or_nothing
@fails_on_one_rank
@pytest.mark.world_sizes(fewest=2)
def test_a_load_that_fails_below_a_module_around_units(cpu_twins: Twins) -> None:
    """The unit with the fault is left unchanged, and nn.Module continues with the next unit."""
    bias = "body.parts.0.inner.bias"

    def is_reported(seen: Seen) -> bool:
        first, second, *_ = [str(one["error"]) for one in values_of(seen)]
        is_untouched = each(lambda one: bias not in one["changed"])(seen)
        return is_untouched and "rank 1 could not load" in first and "size mismatch" in second

    cpu_twins.deviate(
        cases.failed_below, FLAT, torch_does=each(lambda one: bias in one["changed"]), we_do=is_reported
    )


@all_or_nothing
@fails_on_one_rank
def test_extra_states_of_a_load_that_fails(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        hook_cases.remembered,
        FLAT,
        torch_does=each(lambda memory: memory == ["old"]),
        we_do=each(lambda memory: memory == ["new"]),
    )


@all_or_nothing
@fails_on_one_rank
def test_a_hook_that_raises(twins_of: TwinsOf) -> None:
    is_told = each(lambda one: one["error"] == "KeyError: 'injected'")
    twins_of(1).deviate(
        hook_cases.raised_by_a_hook,
        ORIGINALS,
        torch_does=lambda seen: is_told(seen) and has_changed(seen),
        we_do=lambda seen: is_told(seen) and is_as_before(seen),
    )


@clause("distributed.fsdp.fsdp_state_dict.misfits")
def test_what_a_module_puts_in_and_does_not_fit(cpu_twins: Twins) -> None:
    for one in cpu_twins.values(hook_cases.loaded_in_its_own_way, FLAT, fits=False):
        assert "head.weight: rank" in one["error"]
        assert "shape (1, 7), but keeps a tensor of shape (2, 7)" in one["error"]
        assert not one["changed"]


@clause("distributed.fsdp.fsdp_state_dict.misfits")
@pytest.mark.parametrize(
    ("setup", "kind"),
    [(FLAT, "ShardedTensor"), (ORIGINALS, "ShardedTensor"), (MESH, "DTensor")],
    ids=["flat", "originals", "mesh"],
)
@pytest.mark.world_sizes(fewest=2)
def test_parts_of_another_shape(cpu_twins: Twins, setup: Setup, kind: str) -> None:
    reported = (
        f"body.parts.0.inner.weight: rank 1 of {cpu_twins.world_size} got a {kind} of shape (2, 7) "
        "but the parameter has the shape"
    )
    asked = {"form": Form("SHARDED"), "fault": "misshaped part", "on": [1]}
    for one in cpu_twins.values(cases.failed, setup, **asked):
        assert reported in one["error"]
        assert not one["changed"]


@clause("distributed.fsdp.fsdp_state_dict.misfits")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2)
def test_what_has_no_values_is_not_assigned(cpu_twins: Twins, setup: Setup) -> None:
    asked = {"form": Form(), "fault": "without values", "on": [1], "assign": True}
    for one in cpu_twins.values(cases.failed, setup, **asked):
        assert "rank 1 got a meta tensor of shape" in one["error"]
        assert not one["changed"]


@clause("distributed.fsdp.fsdp_state_dict.built_on_meta")
@each_kind
@both_kinds
def test_modules_built_on_meta(cpu_twins: Twins, kind: str, use_orig_params: bool) -> None:
    setup = Setup(arguments={"use_orig_params": use_orig_params})
    for one in cpu_twins.values(cases.built_on_meta, setup, form=Form(kind), assign=False):
        assert one == {"ignored": False, "managed": True, "warned": True}


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("fsdp.shards_said_to_be_on_the_cpu")
@pytest.mark.parametrize(("kind", "offloads"), [("SHARDED", False), ("SHARDED", True), ("LOCAL", False)])
@pytest.mark.world_sizes(fewest=2)
def test_shards_are_where_they_are_said_to_be(twins: Twins, kind: str, offloads: bool) -> None:
    judge_placement(twins, memory_cases.placed, offloads, form=Form(kind, {"offload_to_cpu": offloads}))


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("fsdp.shards_said_to_be_on_the_cpu")
@pytest.mark.parametrize(
    "way",
    [
        StateDictMethod("sharded"),
        StateDictMethod("SHARDED"),
        StateDictMethod("SHARDED", offloads=False),
        StateDictMethod("LOCAL", offloads=False),
    ],
    ids=str,
)
@pytest.mark.world_sizes(fewest=2)
def test_parts_of_states_are_where_they_are_said_to_be(twins: Twins, way: StateDictMethod) -> None:
    judge_placement(twins, memory_cases.placed_states, way.offloads, way=way)


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("optim_state.whole_states_that_are_offloaded")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_states_that_are_not_sharded_are_offloaded(twins: Twins, strategy: str, device: str) -> None:
    twins.deviate(
        memory_cases.devices_of_states,
        leaf_by_leaf(strategy, use_orig_params=True),
        way=StateDictMethod("SHARDED"),
        torch_does=each(lambda seen: seen == {device}),
        we_do=each(lambda seen: seen == {"cpu"}),
        may_agree=True,  # torch agrees on the CPU and for sharded states
    )


def judge_placement(twins: Twins, program: Program, offloads: bool, **asked: Any) -> None:
    twins.deviate(
        program,
        FLAT,
        torch_does=each(lambda seen: {*seen} == {(not offloads, offloads)}),
        we_do=each(lambda seen: {*seen} == {(True, True)}),
        # torch agrees for LOCAL_STATE_DICT, and for groups that serve no other device.
        may_agree=True,
        **asked,
    )


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("fsdp.flat_parameters_that_are_offloaded")
@pytest.mark.world_sizes(fewest=2)
def test_shards_of_flat_parameters_are_offloaded(twins: Twins) -> None:
    twins.deviate(
        memory_cases.placed,
        FLAT,
        form=Form("LOCAL", {"offload_to_cpu": True}),
        torch_does=raises(ValueError, "requires_grad property is incompatible"),
        we_do=each(lambda seen: {*seen} == {(True, True)}),
        may_agree=True,  # torch agrees on the CPU
    )


@clause("distributed.fsdp.fsdp_state_dict.came_late")
@pytest.mark.deviation("fsdp.late_parameter_of_a_wrapped_module")
@each_kind
@flat_or_originals
def test_a_parameter_that_a_wrapped_module_itself_was_given(
    cpu_twins: Twins, setup: Setup, kind: str
) -> None:
    are_parts = kind == "SHARDED" and not cpu_twins.is_alone  # sharded entries are loaded as saved
    expected = torch.full((4,), 1.0 if are_parts else 2.0)

    def holds_of_late(state: dict[str, Any]) -> bool:
        return torch.equal(state["body.late"].values, expected)

    cpu_twins.deviate(
        cases.with_a_late_parameter,
        setup,
        form=Form(kind),
        of="",
        torch_does=raises(AssertionError, "FSDP assumes body..late is in the state_dict"),
        we_do=each(lambda one: "All keys matched" in one["keys"] and holds_of_late(one["state"])),
    )


@clause("distributed.fsdp.fsdp_state_dict.assigned")
@pytest.mark.deviation("fsdp.assigned_parameters")
@each_kind
def test_modules_built_on_meta_are_assigned_to(cpu_twins: Twins, kind: str) -> None:
    cpu_twins.deviate(
        cases.built_on_meta,
        ORIGINALS,
        form=Form(kind),
        assign=True,
        torch_does=each(lambda one: one["ignored"] and not one["managed"]),
        we_do=each(lambda one: one["ignored"] and one["managed"] and not one["warned"]),
        may_agree=cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_state_dict.another_world")
@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED"])
def test_what_half_the_ranks_saved_is_refused(twins_of: TwinsOf, kind: str) -> None:
    for rank, one in enumerate(twins_of(4).values(cases.of_another_world, FLAT, kind=kind)):
        assert f"rank {rank} of 4 got" in one["error"]
        assert not one["changed"]


@clause("distributed.fsdp.fsdp_state_dict.local_with_original_parameters")
@pytest.mark.deviation("fsdp.local_state_dict_of_originals")
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_shards_of_original_parameters(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.loads_its_own,
        ORIGINALS,
        form=Form("LOCAL"),
        torch_does=each(lambda one: "head.weight" in one["keys"] and "Unexpected" in one["reported"]),
        we_do=each(lambda one: "head.weight" not in one["keys"] and one["loaded"]),
    )


@clause("distributed.fsdp.fsdp_state_dict.local_of_originals_by_torch")
@more_worlds
def test_torchs_shards_of_original_parameters(cpu_twins: Twins) -> None:
    asked = {"source": cpu_twins.reference.spec, "form": Form("LOCAL")}
    for one in cpu_twins.values(cases.exchanged, ORIGINALS, **asked):
        assert one["keys"] == "<All keys matched successfully>"
        for name, expected in one["expected"].items():
            assert torch.equal(one["whole"][name].values, expected.values), name


@clause("distributed.fsdp.fsdp_state_dict.local_of_replicas")
@pytest.mark.deviation("fsdp.local_of_replicas")
def test_shards_of_every_replica(twins_of: TwinsOf) -> None:
    twins_of(4).deviate(
        cases.loads_its_own,
        Setup("HYBRID_SHARD", ranks="groups", shards=2, wrap="leaves"),
        form=Form("LOCAL"),
        torch_does=lambda seen: [one.raised is not None for one in seen] == [False, False, True, True],
        we_do=each(lambda one: one["loaded"]),
    )


@clause("distributed.fsdp.fsdp_state_dict.dtensor_without_mesh")
@pytest.mark.deviation("fsdp.dtensor_without_mesh")
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_dtensors_of_a_process_group(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.loads_its_own,
        GROUP,
        form=Form("SHARDED", {"_use_dtensor": True}),
        torch_does=raises(AttributeError),
        we_do=each(lambda one: one["loaded"] and one["types"] == ["DTensor", "Tensor"]),
    )


@clause("distributed.fsdp.fsdp_state_dict.assigned")
@pytest.mark.deviation("fsdp.assigned_parameters")
@flat_or_originals
@each_kind
@more_worlds
def test_parameters_are_assigned(cpu_twins: Twins, setup: Setup, kind: str) -> None:
    we_do = each(lambda one: one["loaded"])
    cpu_twins.deviate(cases.assigned, setup, form=Form(kind), we_do=we_do, may_agree=cpu_twins.is_alone)


@clause("distributed.fsdp.fsdp_state_dict.assigned_shards")
@more_worlds
def test_shards_are_assigned(cpu_twins: Twins) -> None:
    assert all(one["loaded"] for one in cpu_twins.values(cases.assigned, FLAT, form=Form("LOCAL")))


@clause("distributed.fsdp.fsdp_state_dict.settings_after_an_error")
@pytest.mark.deviation("fsdp.state_dict_type_after_an_error")
def test_settings_after_an_error(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.after_an_error_inside,
        FLAT,
        torch_does=each(lambda kind: kind == "SHARDED_STATE_DICT"),
        we_do=each(lambda kind: kind == "FULL_STATE_DICT"),
    )


@clause("distributed.fsdp.fsdp_state_dict.settings_without_units")
@pytest.mark.deviation("fsdp.state_dict_type_without_units")
def test_settings_without_units(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.set_on_no_unit,
        FLAT,
        torch_does=each(lambda one: one.startswith("KeyError")),
        we_do=each(lambda one: one == "entered"),
    )


@clause("distributed.fsdp.fsdp_state_dict.while_whole")
@pytest.mark.deviation("fsdp.rank0_only_while_whole")
def test_the_first_rank_alone_saves_what_all_see(cpu_twins: Twins) -> None:
    def is_first_ones(seen: Seen, holds_of_others: Callable[[Any], bool]) -> bool:
        first, *others = values_of(seen)
        return "head.weight" in first and all(map(holds_of_others, others))

    cpu_twins.deviate(
        cases.saved_while_unsharded,
        FLAT,
        form=Form("FULL", {"rank0_only": True}),
        torch_does=lambda seen: is_first_ones(seen, lambda one: str(one).startswith("KeyError")),
        we_do=lambda seen: is_first_ones(seen, lambda one: not one),
    )


@clause("distributed.fsdp.fsdp_state_dict.while_whole")
@pytest.mark.deviation("fsdp.local_while_whole")
@pytest.mark.world_sizes(fewest=2)
def test_shards_are_not_saved_while_parameters_are_whole(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.saved_while_unsharded,
        FLAT,
        form=Form("LOCAL"),
        torch_does=each(lambda one: str(one).startswith("ValueError")),
        we_do=each(lambda one: str(one).startswith("RuntimeError") and "leave the context first" in str(one)),
    )


@clause("distributed.fsdp.fsdp_state_dict.hooks_of_parts")
@pytest.mark.deviation("fsdp.hooks_see_no_wholes")
@pytest.mark.world_sizes(fewest=2)
def test_what_hooks_see_of_parts(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        hook_cases.seen_by_a_hook,
        FLAT,
        torch_does=each(lambda seen: seen == [True]),
        we_do=each(lambda seen: seen == [False]),
    )


@clause("distributed.fsdp.fsdp_state_dict.bytes_moved")
@pytest.mark.deviation("fsdp.sharded_state_dict_gathers")
@pytest.mark.world_sizes(fewest=2, also=[3, 4])
@pytest.mark.parametrize("setup", [FLAT, Setup()], ids=["leaves", "root"])
def test_sharded_state_dicts_move_what_is_held(cpu_twins: Twins, setup: Setup) -> None:
    """A rank moves at most its share of the model and one row of each parameter."""
    plain = list(TREE.build().parameters())
    elements = sum(p.numel() for p in plain) / cpu_twins.world_size + sum(p[0].numel() for p in plain)
    share = int(elements * torch.float32.itemsize)
    cpu_twins.deviate(
        cases.traffic,
        setup,
        torch_does=each(lambda one: min(one["saving"], one["loading"]) > share),
        we_do=each(lambda one: all(0 < moved <= share for moved in (one["saving"], one["loading"]))),
    )
