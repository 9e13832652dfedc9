"""fully_shard beside what else users train with: compiled blocks, replicas, losses in chunks, checkpoint helpers."""

from __future__ import annotations

import pytest

from conformance.distributed.fsdp import fully_shard_beside_cases as cases
from conformance.distributed.fsdp.test_fully_shard_construct import assert_probes_agree
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankPool


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
