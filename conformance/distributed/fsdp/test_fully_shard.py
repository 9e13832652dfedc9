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
from conformance.distributed.fsdp.scenes.module_trees import FORMS, INPUT_FORMS
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
from conformance.judge.surface import torch_version
from conformance.judge.tolerances import SAME_BITS, TRAINED, Tolerance
from conformance.ranks.collective_traces import Collective
from conformance.strategies.full_sharding import shardings
from conformance.strategies.modules import KINDS, module_trees
from conformance.strategies.sharding import steps, without_stale_gradients

# fully_shard of torch 2.11 finds no tensors in dataclasses, so a unit that returns one takes no part in backward.
_UNSEEN_FORMS = ("dataclass",) if torch_version() == "2.11" else ()
_FORMS, _INPUT_FORMS = (
    tuple(form for form in forms if form not in _UNSEEN_FORMS) for forms in (FORMS, INPUT_FORMS)
)
# Until 2.13, torch leaves several modules that form one unit unsharded if only some of them run again.
_CLOSES_LISTS = torch_version() not in ("2.11", "2.12")


@st.composite
def sharded_trainings(
    draw: st.DrawFn,
    *,
    dtype: torch.dtype = torch.float64,
    tree: dict[str, Any] | None = None,
    befores: tuple[str, ...] = ("", "eval", "no_grad", "freeze", "thaw"),
    **sharding: Any,
) -> ShardedTraining:
    """Draw a model, two or three steps, and a sharding of which the arguments `sharding` are fixed."""
    drawn = draw(shardings(**sharding))
    options = {
        "frozen": ("none", "none", "first", "all"),
        "kinds": (*KINDS, "bare", "counted"),  # modules without parameters are units as well
        "forms": _FORMS,
        "input_forms": _INPUT_FORMS,
        **(tree or {}),
    }
    trees = module_trees(dtype=dtype, **options)
    if drawn.units == "list" and not _CLOSES_LISTS:
        trees = trees.filter(lambda tree: all(group.calls == 1 for group in tree.body.groups()))
    schedule = st.lists(
        steps(("in turn", "together", "no_sync", "unfinished"), befores), min_size=2, max_size=3
    )
    return ShardedTraining(draw(trees), drawn, without_stale_gradients(draw(schedule)))


def assert_trains_like_torch(
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
    assert_trains_like_torch(twins, training)


@clause("distributed.fsdp.fully_shard.trains")
@pytest.mark.parametrize("more_ranks", [pytest.param(3, marks=FULL_PROFILE), 4])
@share_of_examples(0.2)
@given(training=sharded_trainings())
def test_trains_on_more_ranks_than_some_parameters_have_rows(
    twins_of: TwinsOf, more_ranks: int, training: ShardedTraining
) -> None:
    assert_trains_like_torch(twins_of(more_ranks), training)


@clause("distributed.fsdp.fully_shard.replicas")
@pytest.mark.parametrize(
    ("all_ranks", "shards"),
    [(4, 2), (2, 1), pytest.param(2, 2, marks=FULL_PROFILE), pytest.param(4, 1, marks=FULL_PROFILE)],
)
@share_of_examples(0.1)
@given(data=st.data())
def test_replicas_train_like_torch_and_unsharded(
    twins_of: TwinsOf, all_ranks: int, shards: int, data: st.DataObject
) -> None:
    """Each of the `all_ranks // shards` replicas is sharded over `shards` ranks."""
    training = data.draw(sharded_trainings(ranks=("replicas",), shards=shards))
    assert_trains_like_torch(twins_of(all_ranks), training)


@clause("distributed.fsdp.fully_shard.replicas")
@pytest.mark.parametrize(
    ("all_ranks", "size"),
    [(4, 2), pytest.param(2, 1, marks=FULL_PROFILE), pytest.param(2, 2, marks=FULL_PROFILE)],
)
@share_of_examples(0.1)
@given(data=st.data())
def test_units_resharded_to_fewer_ranks_train_like_torch(
    twins_of: TwinsOf, all_ranks: int, size: int, data: st.DataObject
) -> None:
    training = data.draw(sharded_trainings(reshards=(size,)))
    assert_trains_like_torch(twins_of(all_ranks), training)


@clause("distributed.fsdp.fully_shard.ignored_params")
@share_of_examples(0.2)
@given(training=sharded_trainings(ignores=True, units=("root", "leaves", "nested")))
def test_ignored_parameters_stay_local(twins: Twins, training: ShardedTraining) -> None:
    assert_trains_like_torch(twins, training)


@clause("distributed.fsdp.fully_shard.shard_placement_fn")
@share_of_examples(0.2)
@given(training=sharded_trainings(places=True, units=("leaves", "groups", "list")))
def test_parameters_sharded_by_last_dimension_train_like_torch(
    twins: Twins, training: ShardedTraining
) -> None:
    assert_trains_like_torch(twins, training)


@clause("distributed.fsdp.fully_shard.mesh_per_parameter")
@pytest.mark.parametrize(("all_ranks", "shards"), [(2, 1), pytest.param(4, 2, marks=FULL_PROFILE)])
@share_of_examples(0.1)
@given(data=st.data())
def test_parameters_on_other_mesh_than_unit_train_like_torch(
    twins_of: TwinsOf, all_ranks: int, shards: int, data: st.DataObject
) -> None:
    training = data.draw(sharded_trainings(meshes=True, shards=shards, units=("root", "leaves", "groups")))
    assert_trains_like_torch(twins_of(all_ranks), training)


@clause("distributed.fsdp.fully_shard.offload_policy")
@share_of_examples(0.2)
@given(training=sharded_trainings(offloads=True))
def test_offloaded_parameters_train_like_torch(twins: Twins, training: ShardedTraining) -> None:
    assert_trains_like_torch(twins, training)


LOW, FULL = torch.bfloat16, torch.float32
# Arguments of MixedPrecisionPolicy, most often with low precision and casts.
policies = st.fixed_dictionaries(
    {
        "param_dtype": st.sampled_from([LOW, LOW, FULL, None]),
        "reduce_dtype": st.sampled_from([None, FULL, LOW]),
        "output_dtype": st.sampled_from([None, FULL, LOW]),
        "cast_forward_inputs": st.sampled_from([True, True, False]),
    }
)
# Three steps of a small model, with 8 bits of precision.
IN_LOW_PRECISION = Tolerance(
    32, "three steps of a small model in low precision, summed in another order", LOW, terms=1.0
)


def _reduces_accumulated_first(training: ShardedTraining) -> bool:
    """Return whether torch may reduce the gradients of `no_sync` before it has those of the last backward.

    It reduces a unit that runs twice at the end of each of its backwards, so that the sums are rounded otherwise.
    """
    repeats = any(group.calls > 1 for group in training.tree.body.groups())
    return repeats and any(step.order == "no_sync" and step.forwards > 1 for step in training.steps)


@clause("distributed.fsdp.fully_shard.mixed_precision")
@share_of_examples(0.3)
@given(data=st.data())
def test_mixed_precision_rounds_like_torch(twins: Twins, data: st.DataObject) -> None:
    """Compare bit by bit, because a tolerance hides in which dtype gradients are accumulated, reduced and averaged."""
    training = data.draw(
        sharded_trainings(
            dtype=torch.float32,
            tree={
                "heads": ("trained", "trained", "frozen", "none"),
                "input_forms": ("keyword", "keyword", "tensor", "dict"),
            },
            befores=("", "eval", "no_grad", "write", "freeze", "thaw"),
            policy=data.draw(policies),
            ignores=data.draw(st.booleans()),
        )
    )
    has_one_order = twins.world_size <= 2 and not _reduces_accumulated_first(training)
    tolerance = SAME_BITS if has_one_order else IN_LOW_PRECISION
    assert_trains_like_torch(twins, training, tolerance, is_exact=False)
