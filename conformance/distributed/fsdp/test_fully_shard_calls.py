"""The methods of a model sharded by fully_shard, one by one and in any order, between forwards and backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.fully_shard_calls import (
    BACKWARD,
    CLEAR,
    EVALUATE,
    FORWARD,
    REPLICAS,
    RESET,
    ROOT,
    SHARDED,
    SKIP,
    STEP,
    TRAIN,
    WAIT,
    UnitCall,
    assert_plays_like_torch,
    play,
    reported,
    setting,
)
from conformance.distributed.fsdp.scenes.fully_shard_training import Sharding
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.distributed.fsdp.scenes.scene import FOUR_UNITS
from conformance.distributed.fsdp.scenes.traffic import gathers_before_barriers, kind
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE, PlainTwins, each
from conformance.judge.clauses import clause
from conformance.judge.deviations import does_as
from conformance.judge.library import Library
from conformance.strategies.full_sharding import programs

STATE_DICT = UnitCall("state_dict")
LOAD, ASSIGN = UnitCall("load"), UnitCall("load", arguments={"assign": True})
_ALL_REDUCE = "set_requires_all_reduce"
_AFTER_FORWARD, _AFTER_BACKWARD = "set_reshard_after_forward", "set_reshard_after_backward"
_TO_FORWARD, _TO_BACKWARD = "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"
_GATHER, _SCATTER, _HOOK = "set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"
_FACTOR = "set_gradient_divide_factor"
_MEMORY = "set_allocate_memory_from_process_group_for_comm"
_UNUSED, _BUFFERS = "set_reduce_scatter_unused_params", "set_reduce_scatter_max_input_buffers"


def sync(value: bool, unit: int = ROOT, **more: bool) -> UnitCall:
    return setting("set_requires_gradient_sync", unit, requires_gradient_sync=value, **more)


Calls = Sequence[UnitCall]


def sequence_params(
    mark: pytest.MarkDecorator, sequences: Mapping[str, Calls], sharding: Sharding = SHARDED
) -> list[Any]:
    """Return test parameters for the sequences of one clause."""
    return [
        pytest.param(calls, sharding, id=f"{mark.args[0].rpartition('.')[2]}, {name}", marks=mark)
        for name, calls in sequences.items()
    ]


UNSHARD: Mapping[str, Calls] = {
    "twice": (setting("unshard", 0), setting("unshard", 0), setting("reshard", 0), *TRAIN),
    "waited for": (setting("unshard", 1, async_op=True), WAIT, setting("reshard", 1), *TRAIN),
    "resharded first": (setting("unshard", 1, async_op=True), setting("reshard", 1), WAIT, *TRAIN),
    "not waited for": (setting("unshard", 0, async_op=True), setting("unshard", 2, async_op=True),
                       *TRAIN, WAIT, *TRAIN),
    "state dict": (setting("unshard"), setting("unshard", 3), STATE_DICT, *TRAIN),
    "state dict before the wait": (setting("unshard", 3, async_op=True), STATE_DICT, WAIT, *TRAIN),
    "in the middle": (FORWARD, setting("reshard"), setting("reshard", 1), BACKWARD, STEP, *TRAIN),
    "among others": (EVALUATE, FORWARD, FORWARD, setting("unshard", 2), BACKWARD, setting("reshard"), STEP, EVALUATE),
}  # fmt: skip
SEQUENCES = [
    *sequence_params(clause("distributed.fsdp.fully_shard.unshard"), UNSHARD),
    *sequence_params(clause("distributed.fsdp.fully_shard.accumulation"), {
        "all": (sync(False), *TRAIN[:2], *TRAIN[:2], sync(True), *TRAIN),
        "the root alone": (sync(False, recurse=False), *TRAIN, *TRAIN),
        "a unit": (sync(False, 1), *TRAIN, sync(True, 1), *TRAIN),
        "not the last": (setting("set_is_last_backward", is_last_backward=False), *TRAIN[:2], *TRAIN[:2],
                         setting("set_is_last_backward", is_last_backward=True), *TRAIN),
        "synchronised": (*TRAIN[:2], *TRAIN, FORWARD, FORWARD, BACKWARD, STEP),
        "two forwards": (sync(False), *TRAIN[:2], FORWARD, FORWARD, sync(True), BACKWARD, STEP),
    }),
    *sequence_params(clause("distributed.fsdp.fully_shard.resharding"), {
        "never": (setting(_AFTER_FORWARD, reshard_after_forward=False), *TRAIN, *TRAIN),
        "always": (setting(_AFTER_FORWARD, reshard_after_forward=True), *TRAIN, EVALUATE),
        "the root": (setting(_AFTER_FORWARD, reshard_after_forward=True, recurse=False), *TRAIN, *TRAIN),
        "a unit": (*TRAIN, setting(_AFTER_FORWARD, 2, reshard_after_forward=False), *TRAIN, EVALUATE),
        "no bool": (setting(_AFTER_FORWARD, reshard_after_forward=2), *TRAIN),
        "backward": (setting(_AFTER_BACKWARD, reshard_after_backward=False), *TRAIN[:2], *TRAIN),
        "backward of the root": (setting(_AFTER_BACKWARD, reshard_after_backward=False, recurse=False),
                                 *TRAIN[:2], *TRAIN),
        "backward of a unit": (setting(_AFTER_BACKWARD, 1, reshard_after_backward=False), *TRAIN[:2],
                               setting(_AFTER_BACKWARD, 1, reshard_after_backward=True), *TRAIN),
    }),
    *sequence_params(clause("distributed.fsdp.fully_shard.reduction"), {
        "factors": (setting(_FACTOR, factor=5.0), setting(_FACTOR, 1, factor=0.5),
                    setting("set_reduce_scatter_divide_factor", 2, factor=3.0), *TRAIN),
        "hooks": (setting(_HOOK, 1, hook="a doubling hook"),
                  setting(_HOOK, hook="a doubling hook", stream="a stream"), *TRAIN),
        "user communication": (setting(_GATHER, 0, comm="an all-gather"),
                               setting(_SCATTER, 2, comm="a reduce-scatter"), *TRAIN),
        "event": (setting("set_post_optim_event", event="an event"), *TRAIN, *TRAIN),
        "event of a stream": (*TRAIN[:2], UnitCall("step_beside"), *TRAIN[:2], UnitCall("step_beside"), EVALUATE),
        "memory": (setting(_MEMORY, enable=True), setting(_MEMORY, 0, enable=True), setting(_MEMORY, 0, enable=False),
                   setting(_GATHER, 1, comm="an all-gather"), setting(_MEMORY, 1, enable=True), *TRAIN),
    }),
    *sequence_params(clause("distributed.fsdp.fully_shard.unused_parameters"), {
        "by all ranks": (SKIP, STEP, setting(_UNUSED, reduce_scatter_unused_params=True), SKIP,
                         setting(_UNUSED, reduce_scatter_unused_params=False), *TRAIN),
        "by the root": (setting(_UNUSED, reduce_scatter_unused_params=True, recurse=False), SKIP, STEP),
        "by a rank": (setting(_UNUSED, 1, reduce_scatter_unused_params=True), UnitCall("skip", 1, {"by": [0]}),
                      STEP, *TRAIN),
    }),
    *sequence_params(clause("distributed.fsdp.fully_shard.input_buffers"), {
        "numbers": (*(setting(_BUFFERS, max_input_buffers=number) for number in (2, 3, 0, -1, True, 1.5)),
                    setting(_BUFFERS, 1, max_input_buffers=2, recurse=False), *TRAIN),
    }),
    *sequence_params(clause("distributed.fsdp.fully_shard.reset_iter_state"), {
        "forward": (*TRAIN, UnitCall("fail_forward", 2), RESET, *TRAIN),
        "no root": (*TRAIN, setting("reset_iter_state", 1), *TRAIN),
        "without need": (*TRAIN, RESET, *TRAIN),
        "gradients": (*TRAIN[:2], RESET, *TRAIN),
    }),
    *sequence_params(clause("distributed.fsdp.fully_shard.conversions"), {
        "loaded": (LOAD, *TRAIN, LOAD, *TRAIN),
        "assigned": (ASSIGN, *TRAIN),
        "assigned later": (*TRAIN, ASSIGN, *TRAIN),
        "behind a forward": (EVALUATE, STATE_DICT, LOAD, EVALUATE, *TRAIN),
        "converted": (UnitCall("convert", arguments={"dtype": torch.float64}), *TRAIN),
        "unsharded": (setting("unshard", 0), UnitCall("convert", arguments={"dtype": torch.float64}), *TRAIN),
    }),
    *sequence_params(clause("distributed.fsdp.fully_shard.accumulation_of_replicas"), {
        name: (all_reduce(False), *TRAIN[:2], *TRAIN[:2], all_reduce(True), *TRAIN)
        for name, all_reduce in {
            "all": lambda value: setting(_ALL_REDUCE, requires_all_reduce=value),
            "the root": lambda value: setting(_ALL_REDUCE, requires_all_reduce=value, recurse=False),
            "a unit": lambda value: setting(_ALL_REDUCE, 0, requires_all_reduce=value, recurse=True),
        }.items()
    }, REPLICAS),
    *sequence_params(clause("distributed.fsdp.fully_shard.reduction_of_replicas"), {
        "hooks": (setting(_HOOK, hook="a doubling hook"), setting(_HOOK, 1, hook="a doubling hook", stream="a stream"),
                  *TRAIN),
    }, REPLICAS),
    # The first unit holds a matrix, which is on a mesh with replicas. The second unit holds no matrix.
    *sequence_params(clause("distributed.fsdp.fully_shard.settings_of_meshes"), {
        "user communication": (setting(_GATHER, 0, comm="an all-gather"), setting(_SCATTER, 0, comm="a reduce-scatter"),
                               setting(_HOOK, 0, hook="a doubling hook", stream="a stream"),
                               setting(_GATHER, 1, comm="an all-gather"), setting(_SCATTER, 1, comm="a reduce-scatter"),
                               *TRAIN),
    }, Sharding(meshes=True)),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "sharding"), SEQUENCES)
@pytest.mark.world_sizes(fewest=2)
def test_calls_match_torch(plain_twins: PlainTwins, calls: Calls, sharding: Sharding) -> None:
    assert_plays_like_torch(plain_twins, calls, sharding=sharding)


@clause("distributed.fsdp.fully_shard.unshard")
@FULL_PROFILE
@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("calls", UNSHARD.values(), ids=UNSHARD)
@pytest.mark.world_sizes(fewest=2)
def test_unshard_matches_torch_with_any_resharding(
    plain_twins: PlainTwins, calls: Calls, reshards: bool
) -> None:
    assert_plays_like_torch(plain_twins, calls, sharding=Sharding(reshard_after_forward=reshards))


@clause("distributed.fsdp.fully_shard.unshard")
@pytest.mark.world_sizes(fewest=2)
def test_units_kept_by_the_user_are_gathered_once_for_evaluations(plain_twins: PlainTwins) -> None:
    unshards = [setting("unshard", unit) for unit in range(ROOT + 1)]
    calls, sharding = (*unshards, EVALUATE, EVALUATE, EVALUATE, *TRAIN), Sharding(reshard_after_forward=False)
    assert_plays_like_torch(plain_twins, calls, sharding=sharding, gathers_again=False)


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
def test_units_are_gathered_at_same_time_as_in_torch(plain_twins: PlainTwins, calls: Calls) -> None:
    """The traces contain a barrier before each unit computes."""
    for expected, actual in zip(*assert_plays_like_torch(plain_twins, calls), strict=True):
        assert gathers_before_barriers(actual) == gathers_before_barriers(expected), (
            reported(actual),
            reported(expected),
        )


@clause("distributed.fsdp.fully_shard.symmetric_memory")
@pytest.mark.world_sizes(fewest=2)
def test_missing_symmetric_memory_is_refused(plain_twins: PlainTwins) -> None:
    def is_refused(value: Any) -> bool:
        return any(str(call["made"]).startswith("RuntimeError: ") for call in value["seen"])

    calls = (setting("set_symm_mem_for_comm", backend="NCCL"), FORWARD)
    plain_twins.check_both(each(is_refused), play, calls=calls)


@clause("distributed.fsdp.fully_shard.sums_alone")
@pytest.mark.world_sizes(fewest=2)
def test_forced_sum_reduction_only_sums(plain_twins: PlainTwins) -> None:
    """Run in float32, where torch lets the collective average by default."""
    force = [setting("set_force_sum_reduction_for_comms", unit, enable=True) for unit in range(ROOT + 1)]
    tree = replace(FOUR_UNITS, dtype=torch.float32)
    for trace in assert_plays_like_torch(plain_twins, (*force, *TRAIN), tree=tree)[1]:
        # An all-to-all has no reduce operator, because the receivers add up.
        ops = {call.reduce_op for call in trace if kind(call) == "scatter"}
        assert ops in ({"SUM"}, {""}, {"SUM", ""}), reported(trace)


_SEPARATE = "set_separate_reduce_scatter_group"


@clause("distributed.fsdp.fully_shard.separate_groups")
@pytest.mark.world_sizes(fewest=2)
def test_reductions_use_separate_group(plain_twins: PlainTwins) -> None:
    """The model has five units: at first only the root uses the separate group, then all units, then none."""
    calls = (
        *(setting(_SEPARATE, recurse=False), *TRAIN),
        *(setting(_SEPARATE), *TRAIN),
        *(setting(_SEPARATE, enable=False), *TRAIN),
    )
    for trace in assert_plays_like_torch(plain_twins, calls, names_groups=True)[1]:
        gathering = {call.group for call in trace if kind(call) == "gather"}
        is_shared = [call.group in gathering for call in trace if kind(call) == "scatter"]
        assert [is_shared[step * 5 :][:5].count(True) for step in range(3)] == [4, 0, 5], reported(trace)


@clause("distributed.fsdp.fully_shard.any_order")
@share_of_examples(0.7)
@given(data=st.data())
def test_calls_in_any_order_match_torch(plain_twins: PlainTwins, data: st.DataObject) -> None:
    module = plain_twins.reference.distributed.fsdp.FSDPModule
    sharding, calls = data.draw(programs(module, plain_twins.world_size))
    assert_plays_like_torch(plain_twins, calls, sharding=sharding)


def judge_by_final_state(twins: PlainTwins, calls: Calls, like: Calls, sharding: Sharding = SHARDED) -> None:
    """Judge a deviation by other calls on torch's side.

    The result of the first call and the final state of the ranks must equal those of torch's ranks after `like`.
    """

    def probe(library: Library, calls: Calls = calls) -> list[Any]:
        return [
            outcome
            if outcome.raised is not None
            else replace(outcome, value=[outcome.value["seen"][0]["made"], outcome.value["held"]])
            for outcome in twins.of(library, play, calls=calls, sharding=sharding)
        ]

    expected = probe(twins.reference, like)
    twins.judge(probe, we_do=lambda result: does_as(expected, result))


_HARMLESS = setting("set_is_last_backward", is_last_backward=True)


@clause("distributed.fsdp.fully_shard.gathered_in_vain")
@pytest.mark.deviation("fully_shard.unsharded_over_a_step")
@pytest.mark.world_sizes(fewest=2)
def test_unused_prefetch_uses_loaded_values(plain_twins: PlainTwins) -> None:
    """The prefetched unit had already run in this forward, and no backward follows.

    `LOAD` doubles the parameters, so that values from before it give other results.

    torch trains the prefetched unit with the values from before the load.
    """
    then = (EVALUATE, LOAD, *TRAIN)
    judge_by_final_state(plain_twins, (setting(_TO_FORWARD, 3, modules=[1]), *then), (_HARMLESS, *then))


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
def test_unit_unsharded_during_step_gets_stepped_values(plain_twins: PlainTwins, calls: Calls) -> None:
    """torch's next forward and backward use the weights from before the step."""
    then = (FORWARD, BACKWARD, UnitCall("step_of_shards"))
    judge_by_final_state(plain_twins, (*calls, *then), (*TRAIN, *then))


@clause("distributed.fsdp.fully_shard.reset_behind_a_backward")
@pytest.mark.deviation("fully_shard.reset_of_accumulation")
@pytest.mark.world_sizes(fewest=2)
def test_reset_drops_gradients_of_failed_backward(plain_twins: PlainTwins) -> None:
    """The user must clear gradients that the failed backward has already stored in `.grad`.

    torch adds the gradients of the failed backward to those of the next one.
    """
    calls = (*TRAIN, UnitCall("fail_backward", 1), RESET, CLEAR, *TRAIN)
    # The evaluation uses up the batch of the failed backward.
    judge_by_final_state(plain_twins, calls, (*TRAIN, EVALUATE, *TRAIN))


@clause("distributed.fsdp.fully_shard.reset_of_accumulation")
@pytest.mark.deviation("fully_shard.reset_of_accumulation")
@pytest.mark.world_sizes(fewest=2)
def test_reset_drops_unsynchronised_gradients(plain_twins: PlainTwins) -> None:
    """torch adds the gradients from before the reset to those of the next backward."""
    calls = (sync(False), FORWARD, BACKWARD, RESET, sync(True), *TRAIN)
    judge_by_final_state(plain_twins, calls, (sync(False), EVALUATE, sync(True), *TRAIN))


@clause("distributed.fsdp.fully_shard.reset_before_all")
@pytest.mark.deviation("fully_shard.reset_before_all")
def test_reset_before_first_forward_is_allowed(plain_twins: PlainTwins) -> None:
    """torch raises AttributeError about an internal attribute."""
    judge_by_final_state(plain_twins, (RESET, *TRAIN), (_HARMLESS, *TRAIN))


@clause("distributed.fsdp.fully_shard.factor_of_one_rank")
@pytest.mark.deviation("fully_shard.factor_of_one_rank")
@pytest.mark.world_sizes(fewest=2)
def test_divide_factor_applies_once_on_single_rank(plain_twins: PlainTwins) -> None:
    """Run in float64. By default, gradients are divided by the number of ranks.

    torch divides the gradients by the factor twice.
    """
    factor = setting(_FACTOR, factor=float(plain_twins.world_size))
    calls, like = (setting("unshard"), factor, *TRAIN), (setting("unshard"), *TRAIN)
    judge_by_final_state(plain_twins, calls, like, REPLICAS)


@clause("distributed.fsdp.fully_shard.stepped_before_backward")
@pytest.mark.deviation("fsdp.graphs_of_former_weights")
def test_backward_after_load_raises(plain_twins: PlainTwins) -> None:
    """torch gathers the loaded weights and computes the gradients of the earlier forward with them."""

    def text_of_backward(value: Any) -> str:
        return str(value["seen"][2]["made"])

    plain_twins.deviate(
        play,
        calls=(FORWARD, LOAD, BACKWARD),
        torch_does=each(lambda value: text_of_backward(value) == "1"),
        we_do=each(lambda value: "modified by an inplace operation" in text_of_backward(value)),
    )
