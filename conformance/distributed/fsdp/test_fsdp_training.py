"""Training under every setup, on real ranks: as torch's ranks do, and as one process does without sharding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.fsdp_cases import Setup, Step, Training
from conformance.distributed.fsdp.judging import assert_trains, share_of_examples
from conformance.distributed.fsdp.module_trees import Group, Leaf, ModuleTree
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks import RankPool
from conformance.strategies.sharding import trainings

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
FULL = pytest.mark.profile("full")
# Units of half a megabyte and more, as real ones are: another way between ranks may pay for them.
LARGE = ModuleTree(Group((Leaf("affine", 20_001), Leaf("affine", 2), Leaf("affine", 40_001))))


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize("strategy", STRATEGIES)
@share_of_examples(0.3)
@given(data=st.data())
def test_trains(
    subject: Library, reference: Library, rank_pool: RankPool, strategy: str, data: st.DataObject
) -> None:
    training = data.draw(trainings(strategy=strategy))
    assert_trains(rank_pool, reference, subject, training)


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize("more_ranks", [3, 4])
@share_of_examples(0.4)
@given(training=st.sampled_from(STRATEGIES[:2]).flatmap(lambda strategy: trainings(strategy=strategy)))
def test_trains_on_more_ranks_than_some_parameters_have_elements(
    subject: Library,
    reference: Library,
    ranks: Callable[..., RankPool],
    more_ranks: int,
    training: Training,
) -> None:
    assert_trains(ranks(more_ranks), reference, subject, training)


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize("more_ranks", [2, 3, pytest.param(4, marks=FULL)])
@pytest.mark.parametrize(
    "setup",
    [
        Setup(wrap="leaves", arguments={"use_orig_params": True}),
        Setup("SHARD_GRAD_OP", wrap="leaves"),
    ],
    ids=lambda setup: setup.strategy,
)
def test_trains_units_of_real_sizes(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], setup: Setup, more_ranks: int
) -> None:
    assert_trains(ranks(more_ranks), reference, subject, Training(LARGE, setup, (Step(), Step())))


@clause("distributed.fsdp.fully_sharded_data_parallel.hybrid")
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize(
    ("all_ranks", "shards"), [(4, 2), pytest.param(2, 2, marks=FULL), pytest.param(4, 4, marks=FULL)]
)
@share_of_examples(0.1)  # making groups takes a second
@given(data=st.data())
def test_trains_replicas(
    subject: Library,
    reference: Library,
    ranks: Callable[..., RankPool],
    strategy: str,
    all_ranks: int,
    shards: int,
    data: st.DataObject,
) -> None:
    training = data.draw(trainings(strategy=strategy, shards=shards, ranks=("groups", "meshes")))
    assert_trains(ranks(all_ranks), reference, subject, training)


@clause("distributed.fsdp.fully_sharded_data_parallel.hybrid")
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@FULL
def test_trains_one_replica(
    subject: Library, reference: Library, ranks: Callable[..., RankPool], world_size: int, strategy: str
) -> None:
    setup = Setup(strategy, ranks="meshes", shards=world_size, wrap="leaves")
    assert_trains(ranks(world_size), reference, subject, Training(LARGE, setup, (Step(), Step())))


@clause("distributed.fsdp.fully_sharded_data_parallel.ignored")
@pytest.mark.parametrize("ignored", ["ignored_modules", "ignored_states", "parameters"])
@share_of_examples(0.3)
@given(data=st.data())
def test_what_is_ignored_stays_each_ranks_own(
    subject: Library, reference: Library, rank_pool: RankPool, ignored: str, data: st.DataObject
) -> None:
    trained = trainings(strategy="FULL_SHARD", ignored=ignored, wraps=("root", "leaves", "size"))
    # In a world of one torch leaves a unit that is frozen without its registered parameters.
    training = data.draw(trained.filter(lambda one: not one.mixes_frozen_with_trained))
    assert_trains(rank_pool, reference, subject, training)
