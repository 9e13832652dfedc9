"""fully_shard beside what else users train with: compiled blocks, replicas, losses in chunks, checkpoint helpers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.distributed.fsdp import fully_shard_beside_cases as cases
from conformance.distributed.fsdp.judging import outcomes
from conformance.distributed.fsdp.test_fully_shard_construct import assert_probes_agree, judge_by_hand
from conformance.distributed.fsdp.twins import raises
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.judge.outcome import observe
from conformance.ranks import RankPool


@clause("distributed.fsdp.fully_shard.reduction")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sums_alone", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_hooks_and_communication_get_what_torchs_do(
    subject: Library, reference: Library, rank_pool: RankPool, dtype: torch.dtype, sums_alone: bool, own: bool
) -> None:
    how: dict[str, Any] = {"dtype": dtype, "sums_alone": sums_alone, "own": own}
    (actual, *_) = assert_probes_agree(rank_pool, (reference, subject), cases.hooked, **how)
    assert actual.raised is None, actual.raised


@clause("distributed.fsdp.fully_shard.pinned")
@pytest.mark.parametrize("pins", [True, False])
def test_offloaded_shards_are_pinned(
    subject: Library, reference: Library, rank_pool: RankPool, device: str, pins: bool
) -> None:
    if device == "cpu":
        unavailable("an accelerator")
    (actual, *_) = assert_probes_agree(rank_pool, (reference, subject), cases.pinned, pins=pins)
    assert actual.raised is None, actual.raised
    assert set(actual.value.pop("waits", [0])) == {0}
    assert {each for where in actual.value.values() for each in where} == {pins}, actual.value


@clause("distributed.fsdp.fully_shard.offloaded_and_changed")
@pytest.mark.deviation("fully_shard.offloaded_and_changed")
def test_what_offloaded_parameters_made_stays(
    deviation: DeviationJudge, rank_pool: RankPool, device: str
) -> None:
    if device == "cpu":
        unavailable("an accelerator")
    deviation.judge(
        lambda library: outcomes(
            rank_pool, library, "fully_shard_construct_cases:probe", asks=cases.changed_behind
        ),
        torch_does=lambda seen: not all(each.value for each in seen),
        we_do=lambda seen: all(each.value for each in seen),
        may_agree=True,  # where copies are done before the host writes
    )


@clause("distributed.fsdp.fully_shard.without_accelerator")
@pytest.mark.deviation("fully_shard.without_accelerator")
@pytest.mark.world_sizes(fewest=2)
@pytest.mark.parametrize("what", ["pinned", "divided"])
def test_what_torch_has_accelerators_do(
    deviation: DeviationJudge, rank_pool: RankPool, device: str, what: str
) -> None:
    if torch.accelerator.is_available() or device != "cpu":
        unavailable("a machine without an accelerator")
    gradient = torch.arange(1.0, 4.0).repeat(2, 1)
    expected = observe(lambda: gradient * rank_pool.world_size / 3 if what == "divided" else gradient)
    judge_by_hand(deviation, rank_pool, expected, cases.without_accelerator, what=what)


@clause("distributed.fsdp.fully_shard.gathered_for_no_backward")
def test_what_no_backward_used_is_gathered_again(
    subject: Library, reference: Library, rank_pool: RankPool
) -> None:
    assert_probes_agree(rank_pool, (reference, subject), cases.gathered_for_no_backward)


@clause("distributed.fsdp.fully_shard.stepped_before_backward")
@pytest.mark.deviation("fully_shard.stepped_before_backward")
@pytest.mark.parametrize(
    ("kept", "how"), [(False, {"fused": True}), (True, {"foreach": True}), (True, {"foreach": False})]
)
def test_a_backward_does_not_read_what_was_stepped_since(
    deviation: DeviationJudge, rank_pool: RankPool, kept: bool, how: dict[str, bool]
) -> None:
    asked = {"asks": cases.stepped_before_backward, "kept": kept, "how": how}
    deviation.judge(
        lambda library: outcomes(rank_pool, library, "fully_shard_construct_cases:probe", **asked),
        we_do=raises(RuntimeError, "has been modified by an inplace operation"),
    )


@clause("distributed.fsdp.fully_shard.stepped_before_backward")
def test_what_a_backward_does_not_read_may_be_stepped(
    subject: Library, reference: Library, rank_pool: RankPool
) -> None:
    asked = {"kept": False, "how": {}, "only": "inner.bias"}
    (actual, *_) = assert_probes_agree(
        rank_pool, (reference, subject), cases.stepped_before_backward, **asked
    )
    assert actual.raised is None, actual.raised


@clause("distributed.fsdp.fully_shard.without_a_backward")
def test_forwards_alone_leave_nothing(subject: Library, rank_pool: RankPool) -> None:
    seen = outcomes(rank_pool, subject, "fully_shard_construct_cases:probe", asks=cases.without_a_backward)
    assert [one.value for one in seen] == [{"hooks": False, "objects": False}] * rank_pool.world_size


@clause("distributed.fsdp.fully_shard.compiled_blocks")
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_blocks_may_be_compiled(subject: Library, reference: Library, rank_pool: RankPool, how: str) -> None:
    (actual, *_) = assert_probes_agree(rank_pool, (reference, subject), cases.compiled, how=how)
    assert actual.raised is None, actual.raised


@clause("distributed.fsdp.fully_shard.loss_in_chunks")
@pytest.mark.parametrize("keeps", [False, True])
def test_the_loss_may_call_a_part(
    subject: Library, reference: Library, rank_pool: RankPool, keeps: bool
) -> None:
    (actual, *_) = assert_probes_agree(rank_pool, (reference, subject), cases.in_chunks, keeps=keeps)
    assert actual.raised is None, actual.raised


@clause("distributed.fsdp.fully_shard.loss_in_chunks")
@pytest.mark.deviation("fully_shard.root_behind_a_part")
def test_the_root_moves_inputs_behind_a_part(deviation: DeviationJudge, rank_pool: RankPool) -> None:
    deviation.judge(
        lambda library: outcomes(
            rank_pool, library, "fully_shard_construct_cases:probe", asks=cases.evaluated_again
        ),
        torch_does=raises(RuntimeError, "Expected all tensors to be on the same device"),
        we_do=lambda seen: all(one.raised is None for one in seen),
        may_agree=True,  # where they are on the CPU anyway
    )


@clause("distributed.fsdp.fully_shard.replicated")
def test_what_is_around_may_be_replicated(subject: Library, reference: Library, rank_pool: RankPool) -> None:
    (actual, *_) = assert_probes_agree(rank_pool, (reference, subject), cases.replicated)
    assert actual.raised is None, actual.raised


@clause("distributed.fsdp.fully_shard.checkpoint_helpers")
@pytest.mark.parametrize("whole", [False, True])
def test_torchs_helpers_save_and_load(
    subject: Library, reference: Library, rank_pool: RankPool, whole: bool
) -> None:
    (actual, *_) = assert_probes_agree(rank_pool, (reference, subject), cases.checkpointed, whole=whole)
    assert actual.raised is None, actual.raised


@clause("distributed.fsdp.fully_shard.whole_states")
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_states_are_put_together(
    subject: Library, reference: Library, rank_pool: RankPool, flat: bool, offloads: bool
) -> None:
    (actual, *_) = assert_probes_agree(
        rank_pool, (reference, subject), cases.whole_states, flat=flat, offloads=offloads
    )
    assert actual.raised is None, actual.raised
