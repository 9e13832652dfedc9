"""Activation checkpointing, of both kinds, inside units and around them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.fsdp_cases import Setup, Step, Training
from conformance.distributed.fsdp.judging import (
    assert_trains,
    outcomes_or_fault,
    share_of_examples,
    trains_like_unsharded,
)
from conformance.distributed.fsdp.module_trees import Group, Leaf, ModuleTree
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.ranks import RankPool
from conformance.strategies.sharding import steps, trainings

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
plain_steps = steps(orders=("in turn",), befores=("",))


def checkpointed(kind: str) -> ModuleTree:
    return ModuleTree(
        Group(
            (Leaf("affine", 4), Group((Leaf("tied"), Leaf("lookup", 2))), Leaf("batched")), checkpointing=kind
        )
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.checkpointing.plain")
@pytest.mark.parametrize("strategy", STRATEGIES)
@share_of_examples(0.2)
@given(data=st.data())
def test_without_reentrance(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, data: st.DataObject
) -> None:
    training = data.draw(trainings(strategy=strategy, tree={"checkpointing": ("plain",)}))
    assert_trains(rank_pool, reference, subject, training)


@clause("distributed.fsdp.fully_sharded_data_parallel.checkpointing.reentrant")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_reentrance(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    setup = Setup(strategy, wrap="leaves", arguments={"use_orig_params": use_orig_params})
    schedule = (Step(), Step(forwards=2, order="no_sync"), Step(forwards=2))
    assert_trains(rank_pool, reference, subject, Training(checkpointed("reentrant"), setup, schedule))


@clause("distributed.fsdp.fsdp_torch_limit_removed.reentrance_anywhere")
@pytest.mark.deviation("fsdp.reentrance_anywhere")
@pytest.mark.parametrize("strategy", STRATEGIES)
@share_of_examples(0.25)
@given(data=st.data())
def test_with_reentrance_whatever_the_module(
    deviation: DeviationJudge, rank_pool: RankPool, strategy: str, data: st.DataObject
) -> None:
    """torch goes wrong on some of these, in silence or by an error: modules called twice, regions in regions."""
    kinds = {"checkpointing": ("reentrant", "none")}
    training = data.draw(trainings(strategy=strategy, tree=kinds, schedule=plain_steps))
    deviation.judge(
        lambda library: outcomes_or_fault(rank_pool, library, "fsdp_cases:train", training=training),
        we_do=lambda seen: trains_like_unsharded(seen, training),
        may_agree=True,
    )
