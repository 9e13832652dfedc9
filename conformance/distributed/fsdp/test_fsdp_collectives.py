"""The number and size of collectives: the minimum for each strategy, and never more than torch's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.distributed.fsdp.scenes.fsdp_training import Setup, Step, Training
from conformance.distributed.fsdp.scenes.module_trees import Leaf, ModuleGroup, ModuleTree
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.distributed.fsdp.scenes.scene import Scene, fill_freed_memory
from conformance.distributed.fsdp.scenes.traffic import (
    are_at_most,
    bytes_by_kind,
    counts,
    gathers_before_barriers,
    kind,
    steps_of,
)
from conformance.distributed.fsdp.scenes.twins import (
    FLAT,
    PlainTwins,
    Twins,
    TwinsOf,
    each_strategy,
    values_of,
)
from conformance.judge.clauses import clause
from conformance.judge.library import Library
from conformance.ranks.collective_traces import Collective
from conformance.strategies.sharding import trainings

# Wrapped leaf by leaf, the model has four units, including the root, which holds the head.
TREE = ModuleTree(ModuleGroup((Leaf("affine", 4), Leaf("tied"), Leaf("lookup", 3))))
UNITS = 4
PLAIN = (Step(), Step(), Step())
SCHEDULES = {
    "one forward": PLAIN,
    "no_sync": (Step(forwards=3, order="no_sync"),) * 2,
    "two forwards": (Step(forwards=2),) * 2,
}
LOOKS = ("eval", "no_grad")
# Gathers, scatters and reductions of a step. The root stays unsharded from its forward to its backward.
LEAST = {
    ("FULL_SHARD", "one forward"): (2 * UNITS - 1, UNITS, 0),
    ("SHARD_GRAD_OP", "one forward"): (UNITS, UNITS, 0),
    ("NO_SHARD", "one forward"): (0, 0, UNITS),
    ("FULL_SHARD", "no_sync"): (3 * (2 * UNITS - 1), UNITS, 0),
    # Unsharded parameters stay until gradients are reduced.
    ("SHARD_GRAD_OP", "no_sync"): (UNITS, UNITS, 0),
    ("NO_SHARD", "no_sync"): (0, 0, UNITS),
    ("FULL_SHARD", "two forwards"): (2 * (2 * UNITS - 1), 2 * UNITS, 0),
    ("SHARD_GRAD_OP", "two forwards"): (2 * UNITS, 2 * UNITS, 0),
}


def collectives_of_steps(
    twins: Twins, training: Training, library: Library | None = None
) -> list[list[list[Collective]]]:
    """Return the collectives of each rank in each step of the training. The library is the subject by default."""
    values_of(twins.trained(library or twins.subject, training))
    return [steps_of(trace) for trace in twins.pool.traces]


def expected_counts(gathers: int, scatters: int, reductions: int) -> Counter[str]:
    return +Counter(gather=gathers, scatter=scatters, reduce=reductions)


def assert_counts(traces: list[list[list[Collective]]], expected: Counter[str]) -> None:
    for rank, steps in enumerate(traces):
        for number, step in enumerate(steps):
            assert counts(step) == expected, f"rank {rank}, step {number}: {[str(call) for call in step]}"


@clause("distributed.fsdp.fully_sharded_data_parallel.collectives")
@pytest.mark.world_sizes(fewest=2, also=[3])
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", None])
@pytest.mark.parametrize(("strategy", "schedule"), LEAST)
def test_each_step_issues_fewest_collectives(
    cpu_twins: Twins, strategy: str, schedule: str, prefetch: str | None
) -> None:
    setup = Setup(strategy, wrap="leaves", backward_prefetch=prefetch)
    traces = collectives_of_steps(cpu_twins, Training(TREE, setup, SCHEDULES[schedule]))
    assert_counts(traces, expected_counts(*LEAST[strategy, schedule]))


@clause("distributed.fsdp.fully_sharded_data_parallel.collectives")
@pytest.mark.world_sizes(fewest=2)
@each_strategy
@pytest.mark.parametrize("before", LOOKS)
def test_forward_without_gradients_gathers_each_unit_at_most_once(
    cpu_twins: Twins, strategy: str, before: str
) -> None:
    """A step is such a forward, and a forward with a backward. The first one gathers each unit at most once.

    The bound is loose, because torch keeps some units unsharded: deviation fsdp.step_after_evaluation.
    """
    training = Training(TREE, Setup(strategy, wrap="leaves"), (Step(before=before),) * 2)
    least = expected_counts(*LEAST[strategy, "one forward"])
    most = least + Counter(gather=0 if strategy == "NO_SHARD" else UNITS)
    for steps in collectives_of_steps(cpu_twins, training):
        for step in steps:
            assert least <= counts(step) <= most, [str(call) for call in step]


@clause("distributed.fsdp.fully_sharded_data_parallel.collectives")
@pytest.mark.parametrize(
    ("strategy", "gathers"), [("HYBRID_SHARD", 2 * UNITS - 1), ("_HYBRID_SHARD_ZERO2", UNITS)]
)
def test_replicas_reduce_scattered_gradients(twins_of: TwinsOf, strategy: str, gathers: int) -> None:
    setup = Setup(strategy, ranks="meshes", shards=2, wrap="leaves")
    traces = collectives_of_steps(twins_of(4), Training(TREE, setup, PLAIN))
    assert_counts(traces, expected_counts(gathers, UNITS, UNITS))
    reduced = [call for call in traces[0][0] if call.name == "allreduce_"]
    assert {call.members for call in reduced} == {(0, 2)}


def barriers_where_units_compute(scene: Scene) -> None:
    """Run two forwards and backwards with a barrier wherever a unit's module begins to compute."""
    for unit in scene.units[1:]:
        unit.module.register_forward_pre_hook(_meet)
        unit.module.register_full_backward_pre_hook(_meet)
    for number in range(2):
        scene.backward(number)


def _meet(*_: Any) -> None:
    dist.barrier()


@clause("distributed.fsdp.fully_sharded_data_parallel.prefetching")
@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("backward_prefetch", ["BACKWARD_PRE", None])
@pytest.mark.world_sizes(fewest=2)
def test_units_are_gathered_before_previous_unit_computes(
    cpu_twins: Twins, backward_prefetch: str | None, forward_prefetch: bool
) -> None:
    """The model has five units. The root is gathered first and stays unsharded for its backward."""
    arguments = {"forward_prefetch": forward_prefetch}
    setup = Setup(wrap="leaves", arguments=arguments, backward_prefetch=backward_prefetch)
    cpu_twins.values(barriers_where_units_compute, setup)
    forward = [3, 4, 5, 5] if forward_prefetch else [2, 3, 4, 5]
    backward = [2, 3, 4, 4] if backward_prefetch else [1, 2, 3, 4]
    for trace in cpu_twins.pool.traces:
        gathers = gathers_before_barriers(trace)[8:]
        assert gathers == [10 - 1 + before for before in (*forward, *(5 + before for before in backward))]


@clause("distributed.fsdp.fully_sharded_data_parallel.prefetching")
@pytest.mark.parametrize(
    ("backward_prefetch", "backward"),
    [
        ("BACKWARD_PRE", "gather gather scatter gather scatter scatter scatter"),
        ("BACKWARD_POST", "gather gather scatter gather scatter scatter scatter"),
        (None, "gather scatter gather scatter gather scatter scatter"),
    ],
)
@pytest.mark.world_sizes(fewest=2)
def test_prefetch_setting_orders_gathers_and_reductions(
    cpu_twins: Twins, backward_prefetch: str | None, backward: str
) -> None:
    """The model has four units. The root is gathered first and stays unsharded for its backward."""
    setup = Setup(wrap="leaves", backward_prefetch=backward_prefetch)
    for rank, steps in enumerate(collectives_of_steps(cpu_twins, Training(TREE, setup, PLAIN))):
        for step in steps:
            assert " ".join(kind(call) for call in step[UNITS:]) == backward, f"rank {rank}"


@clause("distributed.fsdp.fully_sharded_data_parallel.collectives")
@pytest.mark.world_sizes(fewest=2)
def test_units_that_run_twice_are_gathered_once_per_run(cpu_twins: Twins) -> None:
    """Two units run twice in each forward and are unsharded once in backward. The root stays unsharded."""
    tree = ModuleTree(ModuleGroup((Leaf("affine", 2), Leaf("affine", 2)), calls=2))
    setup = Setup(wrap="leaves", arguments={"forward_prefetch": True})
    traces = collectives_of_steps(cpu_twins, Training(tree, setup, PLAIN))
    assert_counts(traces, expected_counts(1 + 2 * 2 + 2, 3, 0))


@clause("distributed.fsdp.fully_sharded_data_parallel.bytes_on_the_wire")
@each_strategy
@pytest.mark.world_sizes(fewest=2)
def test_each_parameter_is_sent_once_per_collective(cpu_twins: Twins, strategy: str) -> None:
    """Count the bytes of each collective.

    The units have 16, 12, 15 and 20 elements. On two ranks, only one of them needs padding.
    """
    setup = Setup(strategy, wrap="leaves")
    traces = collectives_of_steps(cpu_twins, Training(TREE, setup, PLAIN))
    units = [_padded(numel, cpu_twins.world_size) * 8 for numel in unit_numels()]
    expected = {
        "FULL_SHARD": {"gather": 2 * sum(units) - units[-1], "scatter": sum(units)},
        "SHARD_GRAD_OP": {"gather": sum(units), "scatter": sum(units)},
        "NO_SHARD": {"reduce": sum(numel * 8 for numel in unit_numels())},
    }
    for steps in traces:
        for step in steps:
            assert bytes_by_kind(step) == Counter(expected[strategy])


def summon_between_barriers(scene: Scene) -> None:
    dist.barrier()
    with scene.fsdp.summon_full_params(scene.model):
        pass
    dist.barrier()


@clause("distributed.fsdp.fully_sharded_data_parallel.summon_full_params.bytes_on_the_wire")
def test_summoning_gathers_each_parameter_once(cpu_twins: Twins) -> None:
    cpu_twins.values(summon_between_barriers, FLAT, tree=TREE)
    whole = sum(_padded(numel, cpu_twins.world_size) * 8 for numel in unit_numels())
    for trace in cpu_twins.pool.traces:
        (summoning,) = steps_of(trace)
        assert bytes_by_kind(summoning) == (
            Counter({"gather": whole}) if not cpu_twins.is_alone else Counter()
        )


def unit_numels() -> list[int]:
    model = TREE.build()
    parts = [*model.body.parts, model.head]
    return [sum(parameter.numel() for parameter in part.parameters()) for part in parts]


def _padded(numel: int, ranks: int) -> int:
    return -(-numel // ranks) * ranks


@clause("distributed.fsdp.fully_sharded_data_parallel.collectives_of_torch")
@each_strategy
@share_of_examples(0.3)
@given(data=st.data())
def test_steps_send_at_most_as_much_as_torch(twins: Twins, strategy: str, data: st.DataObject) -> None:
    # Tandem may gather a partly frozen unit in two halves, because the frozen half needs no gradients.
    training = data.draw(
        trainings(strategy=strategy).filter(lambda drawn: not drawn.mixes_frozen_with_trained)
    )
    # Forwards without gradients are covered by an earlier test.
    steps = [replace(step, before="") if step.before in LOOKS else step for step in training.steps]
    training = replace(training, steps=steps)
    allowed, traces = (
        collectives_of_steps(twins, training, twins.reference),
        collectives_of_steps(twins, training),
    )
    for rank, (most, actual) in enumerate(zip(allowed, traces, strict=True)):
        for number, (expected, step) in enumerate(zip(most, actual, strict=True)):
            assert are_at_most([step], [expected]), (
                f"rank {rank}, step {number}: {[str(call) for call in step]}; "
                f"torch {[str(call) for call in expected]}"
            )


class NanInGathers(TorchDispatchMode):
    """Mode that counts the all-gathers that send nan."""

    number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d" and "allgather" in function.__name__:
            self.number += any(tensor.isnan().any() for tensor in tree_leaves(args[1]))
        return function(*args, **kwargs or {})


def gathers_with_nan(scene: Scene, *, api: str) -> int:
    """Train a layer whose rows no number of ranks divides. Return the number of all-gathers that send nan."""
    device = scene.rank.device
    layer = nn.Linear(1, 11, bias=False, device=device)
    model = scene.wrap(layer) if api == "FSDP1" else scene.shard(layer)
    gathered = 11 + -11 % scene.rank.world_size
    with NanInGathers() as gathers:
        for _ in range(2):
            fill_freed_memory(gathered, device, torch.nan)
            model(torch.ones(2, 1, device=device)).sum().backward()
    return gathers.number


@clause("distributed.fsdp.fully_shard.padding")
@pytest.mark.parametrize("api", ["FSDP1", "fully_shard"])
def test_gathers_of_uneven_shards_send_no_nan(plain_twins: PlainTwins, api: str) -> None:
    assert {outcome.value for outcome in plain_twins.agree(gathers_with_nan, api=api)} == {0}
