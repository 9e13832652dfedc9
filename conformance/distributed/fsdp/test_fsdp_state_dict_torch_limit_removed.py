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
    RankOutcomes,
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
has_changed, is_as_before = each(lambda value: value["changed"]), each(lambda value: not value["changed"])


def refused_for(rank: int) -> Callable[[RankOutcomes], bool]:
    """Return whether all other ranks report that this rank could not load, and no rank changed anything."""

    def do(outcomes: RankOutcomes) -> bool:
        reported = [f"rank {rank} could not load" in str(value["error"]) for value in values_of(outcomes)]
        return is_as_before(outcomes) and reported == [number != rank for number in range(len(outcomes))]

    return do


all_or_nothing = clause("distributed.fsdp.fsdp_state_dict.all_or_nothing")
fails_on_one_rank = pytest.mark.deviation("fsdp.load_that_fails_on_one_rank")


@all_or_nothing
@fails_on_one_rank
@pytest.mark.parametrize("fault", ["missing", "misshaped", "without values"])
@flat_or_originals
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_load_failure_on_one_rank_changes_nothing(cpu_twins: Twins, setup: Setup, fault: str) -> None:
    arguments = {"form": Form(), "fault": fault, "on": [1]}
    cpu_twins.deviate(cases.failed, setup, **arguments, torch_does=has_changed, we_do=refused_for(1))


@all_or_nothing
@fails_on_one_rank
def test_load_failure_on_all_ranks_changes_nothing(cpu_twins: Twins) -> None:
    arguments = {"form": Form("SHARDED"), "fault": "missing", "on": range(cpu_twins.world_size)}
    cpu_twins.deviate(cases.failed, FLAT, **arguments, torch_does=has_changed, we_do=is_as_before)


@all_or_nothing
@fails_on_one_rank
@pytest.mark.parametrize("kind", ["SHARDED", "LOCAL"])
@pytest.mark.parametrize("fault", ["missing buffer", "misshaped buffer"])
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_parts_are_loaded_by_all_or_by_none(cpu_twins: Twins, kind: str, fault: str) -> None:
    last = cpu_twins.world_size - 1
    arguments = {"form": Form(kind), "fault": fault, "on": [last]}
    cpu_twins.deviate(cases.failed, FLAT, **arguments, torch_does=has_changed, we_do=refused_for(last))


@all_or_nothing
@fails_on_one_rank
@pytest.mark.world_sizes(fewest=2)
def test_load_failure_below_plain_module_keeps_unit_unchanged(cpu_twins: Twins) -> None:
    """The unit with the fault is left unchanged, and nn.Module continues with the next unit."""
    bias = "body.parts.0.inner.bias"

    def is_reported(outcomes: RankOutcomes) -> bool:
        first, second, *_ = [str(value["error"]) for value in values_of(outcomes)]
        is_untouched = each(lambda value: bias not in value["changed"])(outcomes)
        return is_untouched and "rank 1 could not load" in first and "size mismatch" in second

    cpu_twins.deviate(
        cases.failed_below, FLAT, torch_does=each(lambda value: bias in value["changed"]), we_do=is_reported
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
def test_load_hook_that_raises_changes_nothing(twins_of: TwinsOf) -> None:
    is_reported = each(lambda value: value["error"] == "KeyError: 'injected'")
    twins_of(1).deviate(
        hook_cases.raised_by_a_hook,
        ORIGINALS,
        torch_does=lambda outcomes: is_reported(outcomes) and has_changed(outcomes),
        we_do=lambda outcomes: is_reported(outcomes) and is_as_before(outcomes),
    )


@clause("distributed.fsdp.fsdp_state_dict.misfits")
def test_misfitting_weight_of_custom_load_raises(cpu_twins: Twins) -> None:
    for value in cpu_twins.values(hook_cases.loaded_in_its_own_way, FLAT, fits=False):
        assert "head.weight: rank" in value["error"]
        assert "shape (1, 7), but keeps a tensor of shape (2, 7)" in value["error"]
        assert not value["changed"]


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
    arguments = {"form": Form("SHARDED"), "fault": "misshaped part", "on": [1]}
    for value in cpu_twins.values(cases.failed, setup, **arguments):
        assert reported in value["error"]
        assert not value["changed"]


@clause("distributed.fsdp.fsdp_state_dict.misfits")
@flat_or_originals
@pytest.mark.world_sizes(fewest=2)
def test_meta_tensor_is_not_assigned(cpu_twins: Twins, setup: Setup) -> None:
    arguments = {"form": Form(), "fault": "without values", "on": [1], "assign": True}
    for value in cpu_twins.values(cases.failed, setup, **arguments):
        assert "rank 1 got a meta tensor of shape" in value["error"]
        assert not value["changed"]


@clause("distributed.fsdp.fsdp_state_dict.built_on_meta")
@each_kind
@both_kinds
def test_modules_built_on_meta(cpu_twins: Twins, kind: str, use_orig_params: bool) -> None:
    setup = Setup(arguments={"use_orig_params": use_orig_params})
    for value in cpu_twins.values(cases.built_on_meta, setup, form=Form(kind), assign=False):
        assert value == {"ignored": False, "managed": True, "warned": True}


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("fsdp.shards_said_to_be_on_the_cpu")
@pytest.mark.parametrize(("kind", "offloads"), [("SHARDED", False), ("SHARDED", True), ("LOCAL", False)])
@pytest.mark.world_sizes(fewest=2)
def test_shards_are_where_they_are_said_to_be(twins: Twins, kind: str, offloads: bool) -> None:
    judge_placement(
        twins, memory_cases.shard_placements, offloads, form=Form(kind, {"offload_to_cpu": offloads})
    )


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
    judge_placement(twins, memory_cases.state_placements, way.offloads, way=way)


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("optim_state.whole_states_that_are_offloaded")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_states_that_are_not_sharded_are_offloaded(twins: Twins, strategy: str, device: str) -> None:
    twins.deviate(
        memory_cases.devices_of_states,
        leaf_by_leaf(strategy, use_orig_params=True),
        way=StateDictMethod("SHARDED"),
        torch_does=each(lambda devices: devices == {device}),
        we_do=each(lambda devices: devices == {"cpu"}),
        may_agree=True,  # torch agrees on the CPU and for sharded states
    )


def judge_placement(twins: Twins, program: Program, offloads: bool, **arguments: Any) -> None:
    twins.deviate(
        program,
        FLAT,
        torch_does=each(lambda placements: {*placements} == {(not offloads, offloads)}),
        we_do=each(lambda placements: {*placements} == {(True, True)}),
        # torch agrees for LOCAL_STATE_DICT, and for groups that serve no other device.
        may_agree=True,
        **arguments,
    )


@clause("distributed.fsdp.fsdp_state_dict.placed")
@pytest.mark.deviation("fsdp.flat_parameters_that_are_offloaded")
@pytest.mark.world_sizes(fewest=2)
def test_shards_of_flat_parameters_are_offloaded(twins: Twins) -> None:
    twins.deviate(
        memory_cases.shard_placements,
        FLAT,
        form=Form("LOCAL", {"offload_to_cpu": True}),
        torch_does=raises(ValueError, "requires_grad property is incompatible"),
        we_do=each(lambda placements: {*placements} == {(True, True)}),
        may_agree=True,  # torch agrees on the CPU
    )


@clause("distributed.fsdp.fsdp_state_dict.came_late")
@pytest.mark.deviation("fsdp.late_parameter_of_a_wrapped_module")
@each_kind
@flat_or_originals
def test_late_parameter_of_wrapped_module_is_saved_and_loaded(
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
        we_do=each(lambda value: "All keys matched" in value["keys"] and holds_of_late(value["state"])),
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
        torch_does=each(lambda value: value["ignored"] and not value["managed"]),
        we_do=each(lambda value: value["ignored"] and value["managed"] and not value["warned"]),
        may_agree=cpu_twins.is_alone,
    )


@clause("distributed.fsdp.fsdp_state_dict.another_world")
@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED"])
def test_state_dict_of_half_world_is_refused(twins_of: TwinsOf, kind: str) -> None:
    for rank, value in enumerate(twins_of(4).values(cases.of_another_world, FLAT, kind=kind)):
        assert f"rank {rank} of 4 got" in value["error"]
        assert not value["changed"]


@clause("distributed.fsdp.fsdp_state_dict.local_with_original_parameters")
@pytest.mark.deviation("fsdp.local_state_dict_of_originals")
@pytest.mark.world_sizes(fewest=2, also=[3])
def test_shards_of_original_parameters(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.loads_its_own,
        ORIGINALS,
        form=Form("LOCAL"),
        torch_does=each(lambda value: "head.weight" in value["keys"] and "Unexpected" in value["reported"]),
        we_do=each(lambda value: "head.weight" not in value["keys"] and value["loaded"]),
    )


@clause("distributed.fsdp.fsdp_state_dict.local_of_originals_by_torch")
@more_worlds
def test_torchs_shards_of_original_parameters(cpu_twins: Twins) -> None:
    arguments = {"source": cpu_twins.reference.spec, "form": Form("LOCAL")}
    for value in cpu_twins.values(cases.exchanged, ORIGINALS, **arguments):
        assert value["keys"] == "<All keys matched successfully>"
        for name, expected in value["expected"].items():
            assert torch.equal(value["whole"][name].values, expected.values), name


@clause("distributed.fsdp.fsdp_state_dict.local_of_replicas")
@pytest.mark.deviation("fsdp.local_of_replicas")
def test_shards_of_every_replica(twins_of: TwinsOf) -> None:
    twins_of(4).deviate(
        cases.loads_its_own,
        Setup("HYBRID_SHARD", ranks="groups", shards=2, wrap="leaves"),
        form=Form("LOCAL"),
        torch_does=lambda outcomes: (
            [outcome.raised is not None for outcome in outcomes] == [False, False, True, True]
        ),
        we_do=each(lambda value: value["loaded"]),
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
        we_do=each(lambda value: value["loaded"] and value["types"] == ["DTensor", "Tensor"]),
    )


@clause("distributed.fsdp.fsdp_state_dict.assigned")
@pytest.mark.deviation("fsdp.assigned_parameters")
@flat_or_originals
@each_kind
@more_worlds
def test_parameters_are_assigned(cpu_twins: Twins, setup: Setup, kind: str) -> None:
    we_do = each(lambda value: value["loaded"])
    cpu_twins.deviate(cases.assigned, setup, form=Form(kind), we_do=we_do, may_agree=cpu_twins.is_alone)


@clause("distributed.fsdp.fsdp_state_dict.assigned_shards")
@more_worlds
def test_shards_are_assigned(cpu_twins: Twins) -> None:
    assert all(value["loaded"] for value in cpu_twins.values(cases.assigned, FLAT, form=Form("LOCAL")))


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
        torch_does=each(lambda value: value.startswith("KeyError")),
        we_do=each(lambda value: value == "entered"),
    )


@clause("distributed.fsdp.fsdp_state_dict.while_whole")
@pytest.mark.deviation("fsdp.rank0_only_while_whole")
def test_rank0_only_saves_on_first_rank_while_summoned(cpu_twins: Twins) -> None:
    def saves_on_first_rank_only(outcomes: RankOutcomes, holds_of_others: Callable[[Any], bool]) -> bool:
        first, *others = values_of(outcomes)
        return "head.weight" in first and all(map(holds_of_others, others))

    cpu_twins.deviate(
        cases.saved_while_unsharded,
        FLAT,
        form=Form("FULL", {"rank0_only": True}),
        torch_does=lambda outcomes: saves_on_first_rank_only(
            outcomes, lambda value: str(value).startswith("KeyError")
        ),
        we_do=lambda outcomes: saves_on_first_rank_only(outcomes, lambda value: not value),
    )


@clause("distributed.fsdp.fsdp_state_dict.while_whole")
@pytest.mark.deviation("fsdp.local_while_whole")
@pytest.mark.world_sizes(fewest=2)
def test_shards_are_not_saved_while_parameters_are_whole(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        cases.saved_while_unsharded,
        FLAT,
        form=Form("LOCAL"),
        torch_does=each(lambda value: str(value).startswith("ValueError")),
        we_do=each(
            lambda value: str(value).startswith("RuntimeError") and "leave the context first" in str(value)
        ),
    )


@clause("distributed.fsdp.fsdp_state_dict.hooks_of_parts")
@pytest.mark.deviation("fsdp.hooks_see_no_wholes")
@pytest.mark.world_sizes(fewest=2)
def test_sharded_state_dict_hooks_see_no_full_values(cpu_twins: Twins) -> None:
    cpu_twins.deviate(
        hook_cases.seen_by_a_hook,
        FLAT,
        torch_does=each(lambda sees_values: sees_values == [True]),
        we_do=each(lambda sees_values: sees_values == [False]),
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
        memory_cases.traffic,
        setup,
        torch_does=each(lambda value: min(value["saving"], value["loading"]) > share),
        we_do=each(lambda value: all(0 < moved <= share for moved in (value["saving"], value["loading"]))),
    )
