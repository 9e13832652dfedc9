"""Training with every setup on real ranks, compared with torch's ranks and with one unsharded process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.distributed.fsdp.scenes.scene import Scene
from conformance.distributed.fsdp.scenes.twins import (
    FULL,
    STRATEGIES,
    Twins,
    TwinsOf,
    each_strategy,
    flat_or_originals,
    leaf_by_leaf,
)
from conformance.judge.clauses import clause
from conformance.strategies.sharding import trainings

HYBRIDS = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
# Units of half a megabyte and more, as in real models. Such units may use another transport between ranks.
LARGE = ModuleTree(ModuleGroup((Leaf("affine", 20_001), Leaf("affine", 2), Leaf("affine", 40_001))))


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@each_strategy
@share_of_examples(0.3)
@given(data=st.data())
def test_training_matches_torch_and_unsharded(twins: Twins, strategy: str, data: st.DataObject) -> None:
    twins.train(data.draw(trainings(strategy=strategy)))


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize("more_ranks", [3, 4])
@share_of_examples(0.4)
@given(training=st.sampled_from(STRATEGIES[:2]).flatmap(lambda strategy: trainings(strategy=strategy)))
def test_trains_on_more_ranks_than_some_parameters_have_elements(
    twins_of: TwinsOf, more_ranks: int, training: Training
) -> None:
    twins_of(more_ranks).train(training)


@clause("distributed.fsdp.fully_sharded_data_parallel.trains")
@pytest.mark.parametrize("more_ranks", [2, 3, pytest.param(4, marks=FULL)])
@pytest.mark.parametrize(
    "setup",
    [leaf_by_leaf(use_orig_params=True), leaf_by_leaf("SHARD_GRAD_OP")],
    ids=lambda setup: setup.strategy,
)
def test_trains_units_of_real_sizes(twins_of: TwinsOf, setup: Setup, more_ranks: int) -> None:
    twins_of(more_ranks).train(Training(LARGE, setup, (Step(), Step())))


@clause("distributed.fsdp.fully_sharded_data_parallel.hybrid")
@pytest.mark.parametrize("strategy", HYBRIDS)
@pytest.mark.parametrize(
    ("all_ranks", "shards"), [(4, 2), pytest.param(2, 2, marks=FULL), pytest.param(4, 4, marks=FULL)]
)
@share_of_examples(0.1)
@given(data=st.data())
def test_trains_replicas(
    twins_of: TwinsOf, strategy: str, all_ranks: int, shards: int, data: st.DataObject
) -> None:
    drawn = trainings(strategy=strategy, shards=shards, ranks=("groups", "meshes"))
    twins_of(all_ranks).train(data.draw(drawn))


@clause("distributed.fsdp.fully_sharded_data_parallel.hybrid")
@pytest.mark.parametrize("strategy", HYBRIDS)
@FULL
def test_trains_one_replica(cpu_twins: Twins, strategy: str) -> None:
    setup = Setup(strategy, ranks="meshes", shards=cpu_twins.world_size, wrap="leaves")
    cpu_twins.train(Training(LARGE, setup, (Step(), Step())))


@clause("distributed.fsdp.fully_sharded_data_parallel.ignored")
@pytest.mark.parametrize("ignored", ["ignored_modules", "ignored_states", "parameters"])
@share_of_examples(0.3)
@given(data=st.data())
def test_ignored_parameters_stay_local(twins: Twins, ignored: str, data: st.DataObject) -> None:
    trained = trainings(strategy="FULL_SHARD", ignored=ignored, wraps=("root", "leaves", "size"))
    # In a world of one, torch leaves a frozen unit without its registered parameters.
    twins.train(data.draw(trained.filter(lambda training: not training.mixes_frozen_with_trained)))


def ignored_inside(scene: Scene, *, by: str) -> dict[str, Any]:
    """Return the gradients if an inner unit gets the ignored modules or parameters, and the root does not."""
    kind = {"use_orig_params": scene.setup.uses_orig_params}
    part = scene.plain.body.parts[0]
    ignored = [part] if by == "ignored_modules" else list(part.parameters())
    scene.plain.body = scene.wrap(scene.plain.body, **{by: ignored}, **kind)
    scene.model = scene.wrap(scene.plain, **kind)
    return {"loss": scene.backward(), "gradients": scene.gradients()}


@clause("distributed.fsdp.fully_sharded_data_parallel.ignored")
@pytest.mark.parametrize("by", ["ignored_modules", "ignored_states"])
@flat_or_originals
def test_parameters_ignored_by_inner_unit_are_ignored_by_outer(
    cpu_twins: Twins, setup: Setup, by: str
) -> None:
    cpu_twins.agree(ignored_inside, setup, by=by)
