"""Training with every type of sharding on real ranks, compared with torch's ranks and with one unsharded process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes import fully_shard_training
from conformance.distributed.fsdp.scenes.fully_shard_training import ShardedTraining
from conformance.distributed.fsdp.scenes.rank_judging import (
    assert_like_unsharded,
    assert_ranks_agree,
    run_on_ranks,
    share_of_examples,
)
from conformance.distributed.fsdp.scenes.traffic import are_at_most, steps_of
from conformance.distributed.fsdp.scenes.twins import FULL_PROFILE, Twins, TwinsOf
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome
from conformance.judge.tolerances import SAME_BITS, TRAINED, Tolerance
from conformance.ranks.collective_traces import Collective
from conformance.strategies.full_sharding import policies, sharded_trainings


def assert_trains(
    twins: Twins, training: ShardedTraining, tolerance: Tolerance = TRAINED, *, is_exact: bool = True
) -> None:
    """Compare results and traffic with torch's ranks, and results with unsharded training if `is_exact`."""

    def train(library: Library, **how: Any) -> tuple[list[Outcome], list[Sequence[Collective]]]:
        trained = run_on_ranks(twins.pool, library, fully_shard_training.train, training=training, **how)
        return trained, [step for trace in twins.pool.traces for step in steps_of(trace)]

    (expected, most), (actual, sent) = train(twins.reference), train(twins.subject)
    assert_ranks_agree(expected, actual, tolerance)
    if is_exact:
        assert_like_unsharded(actual, training.plain, tolerance)
    if not are_at_most(sent, most) and any(
        step.before in ("eval", "no_grad", "write") for step in training.steps
    ):
        # Deviation fully_shard.written_after_evaluation: units kept after an evaluation may be gathered again.
        _, most = train(twins.reference, reshards_after_evaluations=True)
    assert are_at_most(sent, most), [[str(call) for call in step] for step in sent]


@clause("distributed.fsdp.fully_shard.trains")
@share_of_examples(0.4)
@given(training=sharded_trainings())
def test_training_matches_torch_and_unsharded(twins: Twins, training: ShardedTraining) -> None:
    assert_trains(twins, training)


@clause("distributed.fsdp.fully_shard.trains")
@pytest.mark.parametrize("more_ranks", [pytest.param(3, marks=FULL_PROFILE), 4])
@share_of_examples(0.2)
@given(training=sharded_trainings())
def test_trains_on_more_ranks_than_some_parameters_have_rows(
    twins_of: TwinsOf, more_ranks: int, training: ShardedTraining
) -> None:
    assert_trains(twins_of(more_ranks), training)


@clause("distributed.fsdp.fully_shard.replicas")
@pytest.mark.parametrize(
    ("all_ranks", "shards"),
    [(4, 2), (2, 1), pytest.param(2, 2, marks=FULL_PROFILE), pytest.param(4, 1, marks=FULL_PROFILE)],
)
@share_of_examples(0.1)
@given(data=st.data())
def test_trains_replicas(twins_of: TwinsOf, all_ranks: int, shards: int, data: st.DataObject) -> None:
    training = data.draw(sharded_trainings(ranks=("replicas",), shards=shards))
    assert_trains(twins_of(all_ranks), training)


@clause("distributed.fsdp.fully_shard.replicas")
@pytest.mark.parametrize(
    ("all_ranks", "size"),
    [(4, 2), pytest.param(2, 1, marks=FULL_PROFILE), pytest.param(2, 2, marks=FULL_PROFILE)],
)
@share_of_examples(0.1)
@given(data=st.data())
def test_reshards_to_fewer_ranks(twins_of: TwinsOf, all_ranks: int, size: int, data: st.DataObject) -> None:
    training = data.draw(sharded_trainings(reshards=(size,)))
    assert_trains(twins_of(all_ranks), training)


@clause("distributed.fsdp.fully_shard.ignored_params")
@share_of_examples(0.2)
@given(training=sharded_trainings(ignores=True, units=("root", "leaves", "nested")))
def test_ignored_parameters_stay_local(twins: Twins, training: ShardedTraining) -> None:
    assert_trains(twins, training)


@clause("distributed.fsdp.fully_shard.shard_placement_fn")
@share_of_examples(0.2)
@given(training=sharded_trainings(places=True, units=("leaves", "groups", "list")))
def test_other_dimensions_are_sharded(twins: Twins, training: ShardedTraining) -> None:
    assert_trains(twins, training)


@clause("distributed.fsdp.fully_shard.mesh_per_parameter")
@pytest.mark.parametrize(("all_ranks", "shards"), [(2, 1), pytest.param(4, 2, marks=FULL_PROFILE)])
@share_of_examples(0.1)
@given(data=st.data())
def test_parameters_over_a_mesh_of_their_own(
    twins_of: TwinsOf, all_ranks: int, shards: int, data: st.DataObject
) -> None:
    training = data.draw(sharded_trainings(meshes=True, shards=shards, units=("root", "leaves", "groups")))
    assert_trains(twins_of(all_ranks), training)


@clause("distributed.fsdp.fully_shard.offload_policy")
@share_of_examples(0.2)
@given(training=sharded_trainings(offloads=True))
def test_parameters_on_the_cpu(twins: Twins, training: ShardedTraining) -> None:
    assert_trains(twins, training)


# Three steps of a small model, with 8 bits of precision.
_LOW = Tolerance(
    32, "three steps of a small model in low precision, summed in another order", torch.bfloat16, terms=1.0
)


@clause("distributed.fsdp.fully_shard.mixed_precision")
@share_of_examples(0.3)
@given(data=st.data())
def test_mixed_precision(twins: Twins, data: st.DataObject) -> None:
    """Compare bit by bit, because a tolerance hides in which dtype gradients are accumulated, reduced and averaged."""
    training = data.draw(
        sharded_trainings(
            dtype=torch.float32,
            tree={
                "heads": ("trained", "trained", "frozen", "none"),
                "input_forms": ("keyword", "keyword", "tensor", "dict"),
            },
            befores=("", "eval", "no_grad", "write", "freeze", "thaw"),
            policy=data.draw(policies()),
            ignores=data.draw(st.booleans()),
        )
    )
    has_one_order = twins.world_size <= 2 and not training.reduces_accumulated_first
    assert_trains(twins, training, SAME_BITS if has_one_order else _LOW, is_exact=False)
