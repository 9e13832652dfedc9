"""The methods of a model sharded by fully_shard, one by one and in any order, between forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.call_judging import (
    BACKWARD,
    FORWARD,
    LOOK,
    STEP,
    TRAIN,
    assert_leaves,
    draw_program,
    outcomes_of,
    played,
    reported,
    setting,
)
from conformance.distributed.fsdp.scenes.fully_shard_calls import ROOT, UnitCall
from conformance.distributed.fsdp.scenes.fully_shard_training import Sharding
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.distributed.fsdp.scenes.scene import FOUR_UNITS
from conformance.distributed.fsdp.scenes.traffic import gathers_before_barriers, kind
from conformance.distributed.fsdp.scenes.twins import RankOutcomes, Twins, values_of
from conformance.judge.clauses import clause

FULL = pytest.mark.profile("full")
FLOAT32 = replace(FOUR_UNITS, dtype=torch.float32)


@clause("distributed.fsdp.fully_shard.unshard")
@pytest.mark.parametrize("reshards", [None, pytest.param(False, marks=FULL), pytest.param(True, marks=FULL)])
@pytest.mark.parametrize(
    "calls",
    [
        (setting("unshard", 0), setting("unshard", 0), setting("reshard", 0), *TRAIN),
        (setting("unshard", 1, async_op=True), UnitCall("wait"), setting("reshard", 1), *TRAIN),
        (setting("unshard", 1, async_op=True), setting("reshard", 1), UnitCall("wait"), *TRAIN),
        (
            setting("unshard", 0, async_op=True),
            setting("unshard", 2, async_op=True),
            *TRAIN,
            UnitCall("wait"),
            *TRAIN,
        ),
        (setting("unshard"), setting("unshard", 3), UnitCall("state_dict"), *TRAIN),
        (setting("unshard", 3, async_op=True), UnitCall("state_dict"), UnitCall("wait"), *TRAIN),
        (FORWARD, setting("reshard"), setting("reshard", 1), BACKWARD, STEP, *TRAIN),
        (LOOK, FORWARD, FORWARD, setting("unshard", 2), BACKWARD, setting("reshard"), STEP, LOOK),
    ],
    ids=[
        "twice",
        "waited for",
        "resharded before it is waited for",
        "not waited for",
        "state dict",
        "state dict before it is waited for",
        "in the middle",
        "among others",
    ],
)
@pytest.mark.world_sizes(fewest=2)
def test_unshards_and_reshards(twins: Twins, calls: Sequence[UnitCall], reshards: bool | None) -> None:
    sharding = Sharding(reshard_after_forward=reshards)
    played(twins, calls, sharding=sharding)


_SYNC = "set_requires_gradient_sync"


@clause("distributed.fsdp.fully_shard.accumulation")
@pytest.mark.parametrize(
    "calls",
    [
        (setting(_SYNC, requires_gradient_sync=False), *TRAIN[:2], *TRAIN[:2],
         setting(_SYNC, requires_gradient_sync=True), *TRAIN),
        (setting(_SYNC, requires_gradient_sync=False, recurse=False), *TRAIN, *TRAIN),
        (setting(_SYNC, 1, requires_gradient_sync=False), *TRAIN,
         setting(_SYNC, 1, requires_gradient_sync=True), *TRAIN),
        (setting("set_is_last_backward", is_last_backward=False), *TRAIN[:2], *TRAIN[:2],
         setting("set_is_last_backward", is_last_backward=True), *TRAIN),
        (*TRAIN[:2], *TRAIN, FORWARD, FORWARD, BACKWARD, STEP),
        (setting(_SYNC, requires_gradient_sync=False), *TRAIN[:2], FORWARD, FORWARD,
         setting(_SYNC, requires_gradient_sync=True), BACKWARD, STEP),
    ],
    ids=["all", "the root alone", "a unit", "not the last", "synchronised", "two forwards"],
)  # fmt: skip
@pytest.mark.world_sizes(fewest=2)
def test_gradients_add_up(twins: Twins, calls: Sequence[UnitCall]) -> None:
    played(twins, calls)


_ALL_REDUCE = "set_requires_all_reduce"


@clause("distributed.fsdp.fully_shard.accumulation_of_replicas")
@pytest.mark.parametrize(
    ("unit", "recurses"), [(ROOT, True), (ROOT, False), pytest.param(0, True, marks=FULL)]
)
@pytest.mark.world_sizes(fewest=2)
def test_replicas_add_up_what_they_have_scattered(twins: Twins, unit: int, recurses: bool) -> None:
    def require(value: bool) -> UnitCall:
        return setting(_ALL_REDUCE, unit, requires_all_reduce=value, recurse=recurses)

    calls = (require(False), *TRAIN[:2], *TRAIN[:2], require(True), *TRAIN)
    replicas = Sharding(ranks="replicas")
    played(twins, calls, sharding=replicas)


_AFTER_FORWARD, _AFTER_BACKWARD = "set_reshard_after_forward", "set_reshard_after_backward"


@clause("distributed.fsdp.fully_shard.resharding")
@pytest.mark.parametrize(
    "calls",
    [
        (setting(_AFTER_FORWARD, reshard_after_forward=False), *TRAIN, *TRAIN),
        (setting(_AFTER_FORWARD, reshard_after_forward=True), *TRAIN, LOOK),
        (setting(_AFTER_FORWARD, reshard_after_forward=True, recurse=False), *TRAIN, *TRAIN),
        (*TRAIN, setting(_AFTER_FORWARD, 2, reshard_after_forward=False), *TRAIN, LOOK),
        (setting(_AFTER_FORWARD, reshard_after_forward=2), *TRAIN),
        (setting(_AFTER_BACKWARD, reshard_after_backward=False), *TRAIN[:2], *TRAIN),
        (setting(_AFTER_BACKWARD, reshard_after_backward=False, recurse=False), *TRAIN[:2], *TRAIN),
        (setting(_AFTER_BACKWARD, 1, reshard_after_backward=False), *TRAIN[:2],
         setting(_AFTER_BACKWARD, 1, reshard_after_backward=True), *TRAIN),
    ],
    ids=["never", "always", "the root", "a unit", "no bool", "backward", "backward of the root", "backward of a unit"],
)  # fmt: skip
@pytest.mark.world_sizes(fewest=2)
def test_reshard_settings_take_effect(twins: Twins, calls: Sequence[UnitCall]) -> None:
    played(twins, calls)


_TO_FORWARD, _TO_BACKWARD = "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"


@clause("distributed.fsdp.fully_shard.prefetching")
@pytest.mark.parametrize(
    "calls",
    [
        (*TRAIN, *TRAIN),
        (setting(_TO_FORWARD, 0, modules=[1, 2]), *TRAIN, *TRAIN),
        (setting(_TO_FORWARD, ROOT, modules=[0]), setting(_TO_FORWARD, 0, modules=[1]), *TRAIN, *TRAIN),
        (setting(_TO_BACKWARD, 3, modules=[2, 1]), *TRAIN, *TRAIN),
        (setting(_TO_BACKWARD, ROOT, modules=[3]), setting(_TO_BACKWARD, 3, modules=[0]), *TRAIN, *TRAIN),
        (setting(_TO_FORWARD, 0, modules=["a word"]), setting(_TO_BACKWARD, 0, modules=[1, "a word"])),
        (setting("set_unshard_in_backward", 3, unshard_in_backward=False), *TRAIN, *TRAIN),
    ],
    ids=["by default", "forward", "forward of the root", "backward", "backward of the root", "refused", "not needed"],
)  # fmt: skip
@pytest.mark.world_sizes(fewest=2)
def test_units_are_gathered_at_same_time_as_in_torch(twins: Twins, calls: Sequence[UnitCall]) -> None:
    """The traces contain a barrier before each unit computes."""
    for expected, actual in zip(*played(twins, calls), strict=True):
        assert gathers_before_barriers(actual) == gathers_before_barriers(expected), (
            reported(actual),
            reported(expected),
        )


_FACTOR = "set_gradient_divide_factor"
_MEMORY = "set_allocate_memory_from_process_group_for_comm"
_GATHER, _SCATTER = "set_custom_all_gather", "set_custom_reduce_scatter"


@clause("distributed.fsdp.fully_shard.reduction")
@pytest.mark.parametrize(
    "calls",
    [
        (setting(_FACTOR, factor=5.0), setting(_FACTOR, 1, factor=0.5),
         setting("set_reduce_scatter_divide_factor", 2, factor=3.0), *TRAIN),
        (setting("set_all_reduce_hook", 1, hook="a doubling hook"),
         setting("set_all_reduce_hook", hook="a doubling hook", stream="a stream"), *TRAIN),
        (setting(_GATHER, 0, comm="an all-gather"), setting(_SCATTER, 2, comm="a reduce-scatter"), *TRAIN),
        (setting("set_post_optim_event", event="an event"), *TRAIN, *TRAIN),
        (*TRAIN[:2], UnitCall("step beside"), *TRAIN[:2], UnitCall("step beside"), LOOK),
        (setting(_MEMORY, enable=True), setting(_MEMORY, 0, enable=True), setting(_MEMORY, 0, enable=False),
         setting(_GATHER, 1, comm="an all-gather"), setting(_MEMORY, 1, enable=True), *TRAIN),
    ],
    ids=["factors", "hooks", "of one's own", "event", "event of a stream", "memory"],
)  # fmt: skip
@pytest.mark.world_sizes(fewest=2)
def test_reduction_settings_take_effect(twins: Twins, calls: Sequence[UnitCall]) -> None:
    played(twins, calls)


_UNUSED = "set_reduce_scatter_unused_params"


@clause("distributed.fsdp.fully_shard.unused_parameters")
@pytest.mark.parametrize(
    "calls",
    [
        (UnitCall("skip a unit", 1), STEP,
         setting(_UNUSED, reduce_scatter_unused_params=True), UnitCall("skip a unit", 1),
         setting(_UNUSED, reduce_scatter_unused_params=False), *TRAIN),
        (setting(_UNUSED, reduce_scatter_unused_params=True, recurse=False), UnitCall("skip a unit", 1), STEP),
        (setting(_UNUSED, 1, reduce_scatter_unused_params=True), UnitCall("skip a unit", 1, {"by": [0]}), STEP, *TRAIN),
    ],
    ids=["by all ranks", "by the root", "by a rank"],
)  # fmt: skip
@pytest.mark.world_sizes(fewest=2)
def test_parameters_may_be_unused(twins: Twins, calls: Sequence[UnitCall]) -> None:
    played(twins, calls)


_BUFFERS = "set_reduce_scatter_max_input_buffers"


@clause("distributed.fsdp.fully_shard.input_buffers")
@pytest.mark.world_sizes(fewest=2)
def test_inputs_of_reductions_may_wait(twins: Twins) -> None:
    calls = (
        *(setting(_BUFFERS, max_input_buffers=number) for number in (2, 3, 0, -1, True, 1.5)),
        *(setting(_BUFFERS, 1, max_input_buffers=2, recurse=False), *TRAIN),
    )
    played(twins, calls)


@clause("distributed.fsdp.fully_shard.symmetric_memory")
@pytest.mark.world_sizes(fewest=2)
def test_missing_symmetric_memory_is_refused(twins: Twins) -> None:
    request = setting("set_symm_mem_for_comm", backend="NCCL")
    for library in (twins.reference, twins.subject):
        for outcome in outcomes_of(twins, library, (request, FORWARD)):
            results = [str(call["made"]) for call in outcome.value["seen"]]
            assert any(result.startswith("RuntimeError: ") for result in results), results


@clause("distributed.fsdp.fully_shard.settings_of_meshes")
@pytest.mark.world_sizes(fewest=2)
def test_user_communication_applies_to_one_mesh(twins: Twins) -> None:
    """The first unit holds a matrix, which is on a mesh with replicas. The second unit holds no matrix."""
    calls = (
        setting(_GATHER, 0, comm="an all-gather"),
        setting(_SCATTER, 0, comm="a reduce-scatter"),
        setting("set_all_reduce_hook", 0, hook="a doubling hook", stream="a stream"),
        *(setting(_GATHER, 1, comm="an all-gather"), setting(_SCATTER, 1, comm="a reduce-scatter"), *TRAIN),
    )
    played(twins, calls, sharding=Sharding(meshes=True))


@clause("distributed.fsdp.fully_shard.reduction_of_replicas")
@pytest.mark.world_sizes(fewest=2)
def test_reduction_settings_of_replicas_take_effect(twins: Twins) -> None:
    hook = {"hook": "a doubling hook"}
    calls = (
        setting("set_all_reduce_hook", **hook),
        setting("set_all_reduce_hook", 1, **hook, stream="a stream"),
        *TRAIN,
    )
    played(twins, calls, sharding=Sharding(ranks="replicas"))


@clause("distributed.fsdp.fully_shard.gathered_in_vain")
@pytest.mark.deviation("fully_shard.unsharded_over_a_step")
@pytest.mark.world_sizes(fewest=2)
def test_unused_prefetch_is_gathered_again(twins: Twins) -> None:
    """The prefetched unit had already run in this forward, and no backward follows."""
    calls = (setting(_TO_FORWARD, 3, modules=[1]), LOOK, UnitCall("load"), *TRAIN)
    harmless = setting("set_is_last_backward", is_last_backward=True)
    assert_leaves(twins, calls, (harmless, *calls[1:]))


@clause("distributed.fsdp.fully_shard.unsharded_over_a_step")
@pytest.mark.deviation("fully_shard.unsharded_over_a_step")
@pytest.mark.parametrize(
    "calls",
    [
        (FORWARD, setting(_AFTER_BACKWARD, reshard_after_backward=False), BACKWARD, STEP),
        (FORWARD, BACKWARD, setting("unshard", 1), STEP),
        (FORWARD, BACKWARD, setting("unshard", 2, async_op=True), STEP),
    ],
    ids=["kept", "by hand", "ahead"],
)
@pytest.mark.world_sizes(fewest=2)
def test_unit_unsharded_during_step_gets_stepped_values(twins: Twins, calls: Sequence[UnitCall]) -> None:
    like = [call for call in calls if call in TRAIN]
    then = (FORWARD, BACKWARD, UnitCall("step of shards"))
    assert_leaves(twins, (*calls, *then), (*like, *then))


@clause("distributed.fsdp.fully_shard.factor_of_one_rank")
@pytest.mark.deviation("fully_shard.factor_of_one_rank")
@pytest.mark.world_sizes(fewest=2)
def test_divide_factor_applies_once_on_single_rank(twins: Twins) -> None:
    """Run in float64. By default, gradients are divided by the number of ranks."""
    calls = (setting("unshard"), setting(_FACTOR, factor=float(twins.world_size)), *TRAIN)
    like = (setting("unshard"), *TRAIN)
    assert_leaves(twins, calls, like, Sharding(ranks="replicas"))


@clause("distributed.fsdp.fully_shard.sums_alone")
@pytest.mark.world_sizes(fewest=2)
def test_forced_sum_reduction_only_sums(twins: Twins) -> None:
    """Run in float32, where torch lets the collective average by default."""
    force = [setting("set_force_sum_reduction_for_comms", unit, enable=True) for unit in range(ROOT + 1)]
    for trace in played(twins, (*force, *TRAIN), tree=FLOAT32)[1]:
        # An all-to-all has no reduce operator, because the receivers add up.
        ops = {call.reduce_op for call in trace if kind(call) == "scatter"}
        assert ops <= {"SUM", ""}, reported(trace)


_SEPARATE = "set_separate_reduce_scatter_group"


@clause("distributed.fsdp.fully_shard.separate_groups")
@pytest.mark.world_sizes(fewest=2)
def test_gradients_go_by_a_group_of_their_own(twins: Twins) -> None:
    """The model has five units: at first only the root uses the separate group, then all units, then none."""
    calls = (
        *(setting(_SEPARATE, recurse=False), *TRAIN),
        *(setting(_SEPARATE), *TRAIN),
        *(setting(_SEPARATE, enable=False), *TRAIN),
    )
    for trace in played(twins, calls, names_groups=True)[1]:
        gathering = {call.group for call in trace if kind(call) == "gather"}
        is_shared = [call.group in gathering for call in trace if kind(call) == "scatter"]
        assert [is_shared[step * 5 :][:5].count(True) for step in range(3)] == [4, 0, 5], reported(trace)


@clause("distributed.fsdp.fully_shard.reset_iter_state")
@pytest.mark.parametrize(
    "calls",
    [
        (*TRAIN, UnitCall("failing forward", 2), setting("reset_iter_state"), *TRAIN),
        (*TRAIN, setting("reset_iter_state", 1), *TRAIN),
        (*TRAIN, setting("reset_iter_state"), *TRAIN),
        (*TRAIN[:2], setting("reset_iter_state"), *TRAIN),
    ],
    ids=["forward", "no root", "without need", "gradients"],
)  # fmt: skip
@pytest.mark.world_sizes(fewest=2)
def test_training_continues_after_exception(twins: Twins, calls: Sequence[UnitCall]) -> None:
    played(twins, calls)


@clause("distributed.fsdp.fully_shard.reset_behind_a_backward")
@pytest.mark.deviation("fully_shard.reset_of_accumulation")
@pytest.mark.world_sizes(fewest=2)
def test_gradients_of_a_failed_backward_are_gone(twins: Twins) -> None:
    """The user must clear gradients that the failed backward has already stored in `.grad`."""
    failing = (
        *TRAIN,
        UnitCall("failing backward", 1),
        setting("reset_iter_state"),
        UnitCall("zero_grad"),
        *TRAIN,
    )
    # The evaluation uses up the batch of the failed backward.
    assert_leaves(twins, failing, (*TRAIN, LOOK, *TRAIN))


@clause("distributed.fsdp.fully_shard.reset_of_accumulation")
@pytest.mark.deviation("fully_shard.reset_of_accumulation")
@pytest.mark.world_sizes(fewest=2)
def test_gradients_that_were_not_synchronised_are_gone(twins: Twins) -> None:
    first, then = (setting(_SYNC, requires_gradient_sync=synced) for synced in (False, True))
    calls = (first, FORWARD, BACKWARD, setting("reset_iter_state"), then, *TRAIN)
    assert_leaves(twins, calls, (first, LOOK, then, *TRAIN))


@clause("distributed.fsdp.fully_shard.reset_before_all")
@pytest.mark.deviation("fully_shard.reset_before_all")
def test_reset_before_first_forward_is_allowed(twins: Twins) -> None:
    calls = (setting("reset_iter_state"), *TRAIN)
    harmless = setting("set_is_last_backward", is_last_backward=True)
    assert_leaves(twins, calls, (harmless, *TRAIN))


@clause("distributed.fsdp.fully_shard.conversions")
@pytest.mark.parametrize(
    "calls",
    [
        (UnitCall("load"), *TRAIN, UnitCall("load"), *TRAIN),
        (UnitCall("load", arguments={"assign": True}), *TRAIN),
        (*TRAIN, UnitCall("load", arguments={"assign": True}), *TRAIN),
        (LOOK, UnitCall("state_dict"), UnitCall("load"), LOOK, *TRAIN),
        (UnitCall("convert", arguments={"dtype": torch.float64}), *TRAIN),
        (setting("unshard", 0), UnitCall("convert", arguments={"dtype": torch.float64}), *TRAIN),
    ],
    ids=["loaded", "assigned", "assigned later", "behind a forward", "converted", "unsharded"],
)
@pytest.mark.world_sizes(fewest=2)
def test_parameters_may_be_replaced(twins: Twins, calls: Sequence[UnitCall]) -> None:
    played(twins, calls)


@clause("distributed.fsdp.fully_shard.unshard")
@pytest.mark.world_sizes(fewest=2)
def test_units_kept_by_the_user_are_gathered_once_for_evaluations(twins: Twins) -> None:
    unshards = [setting("unshard", unit) for unit in range(ROOT + 1)]
    calls = (*unshards, LOOK, LOOK, LOOK, *TRAIN)
    played(twins, calls, sharding=Sharding(reshard_after_forward=False), gathers_again=False)


@clause("distributed.fsdp.fully_shard.any_order")
@share_of_examples(0.7)
@given(data=st.data())
def test_calls_in_any_order_match_torch(twins: Twins, data: st.DataObject) -> None:
    sharding, calls = draw_program(twins, data)
    played(twins, calls, sharding=sharding)


@clause("distributed.fsdp.fully_shard.stepped_before_backward")
@pytest.mark.deviation("fsdp.graphs_of_former_weights")
def test_backward_after_load_raises(twins: Twins) -> None:
    """torch gathers the loaded weights and computes the gradients of the earlier forward with them."""

    def backward(outcomes: RankOutcomes) -> Any:
        return values_of(outcomes)[0]["seen"][2]["made"]

    twins.judge(
        lambda library: outcomes_of(twins, library, (FORWARD, UnitCall("load"), BACKWARD)),
        we_do=lambda outcomes: "modified by an inplace operation" in str(backward(outcomes)),
        torch_does=lambda outcomes: backward(outcomes) == 1,
    )
