"""Reentrant and non-reentrant activation checkpointing, inside units and around them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.fsdp_training import Step, Training
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples, trains_like_unsharded
from conformance.distributed.fsdp.scenes.twins import (
    RankOutcomes,
    Twins,
    Wrapping,
    each_strategy,
    each_wrapping,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankFault
from conformance.strategies.sharding import steps, trainings

plain_steps = steps(orders=("in turn",), befores=("",))


def checkpointed(kind: str) -> ModuleTree:
    return ModuleTree(
        ModuleGroup(
            (Leaf("affine", 4), ModuleGroup((Leaf("tied"), Leaf("lookup", 2))), Leaf("batched")),
            checkpointing=kind,
        )
    )


@clause("distributed.fsdp.fully_sharded_data_parallel.checkpointing.plain")
@each_strategy
@share_of_examples(0.2)
@given(data=st.data())
def test_non_reentrant_checkpointing_trains(twins: Twins, strategy: str, data: st.DataObject) -> None:
    twins.train(data.draw(trainings(strategy=strategy, tree={"checkpointing": ("plain",)})))


@clause("distributed.fsdp.fully_sharded_data_parallel.checkpointing.reentrant")
@each_wrapping
def test_reentrant_checkpointing_trains(twins: Twins, wrapping: Wrapping) -> None:
    schedule = (Step(), Step(forwards=2, order="no_sync"), Step(forwards=2))
    twins.train(Training(checkpointed("reentrant"), leaf_by_leaf(**wrapping), schedule))


@clause("distributed.fsdp.fsdp_torch_limit_removed.reentrance_anywhere")
@pytest.mark.deviation("fsdp.reentrance_anywhere")
@each_strategy
@share_of_examples(0.25)
@given(data=st.data())
def test_reentrant_checkpointing_trains_any_module(twins: Twins, strategy: str, data: st.DataObject) -> None:
    """torch trains wrongly or raises in some of these cases: modules that are called twice, and nested regions."""
    kinds = {"checkpointing": ("reentrant", "none")}
    training = data.draw(trainings(strategy=strategy, tree=kinds, schedule=plain_steps))

    def probe(library: Library) -> RankOutcomes | RankFault:
        try:
            return twins.trained(library, training)
        except RankFault as fault:
            return fault

    twins.judge(probe, we_do=lambda outcomes: trains_like_unsharded(outcomes, training), may_agree=True)
