"""Work that impl.distributed.fsdp issues to streams is ordered by waits, each of which is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.distributed.fsdp.scenes.fsdp_training import Setup
from conformance.distributed.fsdp.scenes.fully_shard_training import Sharding
from conformance.distributed.fsdp.scenes.rank_judging import share_of_examples
from conformance.distributed.fsdp.test_scale import world_of
from conformance.strategies.sharding import trainings
from impl.distributed.fsdp.tests.happens_before import (
    HOST,
    Operation,
    OrderedOperation,
    hazards,
    ordered_operations,
)
from impl.distributed.fsdp.tests.recording_streams import RecordingStreams
from impl.distributed.fsdp.tests.streamed import (
    FROZEN,
    OTHERS,
    PLAIN,
    RANK,
    RECOMPUTED,
    TWICE,
    Faulty,
    FullyShards,
    Offloads,
    OneStep,
    Program,
    Trains,
    change,
    faulty,
    log_of,
    skipping_model,
)

pytestmark = [
    pytest.mark.deadline(300),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "keep_low_precision_grads": True}


def setup(strategy: str, prefetch: str | None, *flags: str, **rest: Any) -> Setup:
    ranks = {"ranks": "meshes", "shards": 2} if "HYBRID" in strategy else {}
    arguments = {"limit_all_gathers": "limit_all_gathers" in flags} | dict.fromkeys(flags, True)
    return Setup(strategy, wrap="leaves", backward_prefetch=prefetch, arguments=arguments, **ranks, **rest)


TRAININGS = [
    Trains(built, tree)
    for strategy in STRATEGIES
    for built, tree in (
        (setup(strategy, "BACKWARD_PRE", "limit_all_gathers", "forward_prefetch"), PLAIN),
        (setup(strategy, "BACKWARD_PRE", "use_orig_params", mixed_precision=MIXED), FROZEN),
        (setup(strategy, "BACKWARD_POST", "limit_all_gathers", "use_orig_params"), RECOMPUTED),
        (setup(strategy, None, "forward_prefetch", mixed_precision=MIXED), RECOMPUTED),
        (setup(strategy, None, "limit_all_gathers"), TWICE),
    )
]
FULLY_SHARDING: list[Program] = [
    FullyShards(),
    FullyShards(Sharding(units="nested", reshard_after_forward=False), FROZEN),
    FullyShards(Sharding(policy={"param_dtype": torch.bfloat16}, places=True)),
    FullyShards(Sharding(units="list"), RECOMPUTED),
    FullyShards(Sharding(reshard_after_forward=2)),
    FullyShards(Sharding(units="groups", ranks="replicas", shards=2, reshard_after_forward=True), TWICE),
]
OFFLOADING = [Offloads(strategy) for strategy in STRATEGIES[:3]]


def recorded(program: Program, streams: RecordingStreams) -> list[str]:
    """The hazards of a program; of one that offloads, with the host's own optimizer."""
    with streams.steps_on_host() if isinstance(program, Offloads) else nullcontext():
        return hazards(log_of(program, streams))


@pytest.mark.parametrize(
    "program",
    [
        *TRAININGS,
        *OFFLOADING,
        *FULLY_SHARDING,
        *OTHERS,
    ],
    ids=lambda program: getattr(program, "__name__", str(program)),
)
def test_waits_hold_all_that_is_issued_together(program: Program) -> None:
    streams = RecordingStreams()
    assert recorded(program, streams) == []
    assert {entry.stream for entry in streams.log if isinstance(entry, Operation)} > {"compute"}


def named(operations: list[OrderedOperation], stream: str, name: str) -> list[OrderedOperation]:
    return [
        ordered
        for ordered in operations
        if ordered.operation.stream == stream and name in ordered.operation.name
    ]


BOTH_FACES = pytest.mark.parametrize("face", ["FSDP1", "fully_shard"])


@BOTH_FACES
def test_first_gather_of_a_backward_does_not_wait_for_the_end_of_the_forward(face: str) -> None:
    step = OneStep(face, "FULL_SHARD")
    operations = ordered_operations(log_of(step, RecordingStreams()))
    forward = [ordered for ordered in operations if ordered.index < step.backward_begins]
    loss = [ordered for ordered in forward if ordered.operation.stream == "compute"][-1]
    gathers = [
        ordered
        for ordered in named(operations, "gather", "allgather")
        if ordered.index > step.backward_begins
    ]
    assert gathers
    assert not gathers[0].comes_after(loss)


@BOTH_FACES
def test_reduce_scatter_does_not_wait_for_the_all_reduce_before(face: str) -> None:
    operations = ordered_operations(log_of(OneStep(face, "HYBRID_SHARD"), RecordingStreams()))
    scatters = named(operations, "reduce", "_reduce_scatter_base_") or named(operations, "reduce", "alltoall")
    all_reduces = named(operations, "all_reduce", "allreduce_")
    assert len(scatters) == len(all_reduces) > 2
    for scatter, all_reduce, following in zip(scatters, all_reduces, scatters[1:], strict=False):
        assert all_reduce.comes_after(scatter)
        assert following.index > all_reduce.index
        assert not following.comes_after(all_reduce)


# Waits of the runtime that keep memory from being accessed too early: the waiting stream, and the function that waits.
WAITS = (
    ("gather", "_begin_iteration"),
    ("gather", "_wait_for_writes"),
    ("gather", "_wait_if_idle"),
    ("gather", "gather"),
    ("gather", "summoned"),
    ("gather", "_free"),
    ("compute", "wait_for_gather"),
    ("compute", "begin"),
    ("compute", "keep_until_reduced"),
    ("compute", "_show_gradients"),
    ("compute", "wait_for_gradients"),
    ("reduce", "reduce_gradients"),
    ("reduce", "_show_gradients"),
    ("all_reduce", "_begin_all_reduce"),
    (HOST, "_show_gradients"),
)
# Wait of the host that only bounds memory: at most two units are unsharded.
BOUNDS_MEMORY = {(HOST, "admit")}
# Waits that are tested on the simulated accelerator: for gathers that the user of fully_shard requests before there is
# a root, and for gradients that a loss of the sharded parameters adds to.
SEEN_ELSEWHERE = {("gather", "wait_for_earlier_gathers"), ("compute", "_leave_forward")}
RECORDS = (
    ("gather", "gather"),
    ("compute", "reduce_gradients"),
    ("reduce", "_show_gradients"),
    ("reduce", "wait_for_gradients"),
    ("reduce", "_begin_all_reduce"),
    ("all_reduce", "_show_gradients"),
    ("compute", "note_resharded"),
)
FAULTS: dict[str, tuple[str, Callable[..., None]]] = {
    "gradients that are reduced are not kept": ("keep_until_reduced", lambda self, buffer: None),
    "shards that replicas sum are not kept": ("keep_until_all_reduced", lambda self, shard: None),
    "resharded units are freed at once": ("note_resharded", lambda self, unit, readers=(): unit.free()),
    "gathers wait for nothing": ("admit", lambda self, unit: None),
}
# A night run tests that each wait is needed, and that these programs detect a missing one.
AT_NIGHT = pytest.mark.profile("full")
# Few programs that together need every wait.
HYBRID = TRAININGS[5 * STRATEGIES.index("HYBRID_SHARD") + 1]
TELLING: list[Program] = [*TRAININGS[2:5], HYBRID, OFFLOADING[0], *OTHERS]


def is_seen(make: Callable[[], RecordingStreams]) -> bool:
    return any(recorded(program, make()) for program in TELLING)


def test_list_of_waits_is_complete() -> None:
    requested = set[tuple[str, str]]()
    for program in TELLING:
        recorded(program, streams := Faulty())
        requested |= streams.requested
    assert requested == {*WAITS, *BOUNDS_MEMORY, *SEEN_ELSEWHERE}


@AT_NIGHT
@pytest.mark.parametrize("wait", WAITS, ids="-".join)
def test_dropped_wait_is_detected(wait: tuple[str, str]) -> None:
    assert is_seen(functools.partial(Faulty, drops=wait))


@AT_NIGHT
@pytest.mark.parametrize("record", RECORDS, ids="-".join)
def test_early_event_is_detected(record: tuple[str, str]) -> None:
    assert is_seen(functools.partial(Faulty, early=record))


@AT_NIGHT
@pytest.mark.parametrize("fault", FAULTS)
def test_memory_that_is_let_go_too_early_is_seen(fault: str) -> None:
    with faulty(*FAULTS[fault]):
        assert is_seen(RecordingStreams)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_unused_prefetch_is_gathered_again_after_change(strategy: str) -> None:
    with world_of(RANK.world_size), torch.no_grad():
        model, x = skipping_model(strategy), torch.ones(2, 4)
        for count in (3, 1):
            model(x, count)
        change(model)
        output = model(x, 3)
        fresh = skipping_model(strategy)
        change(fresh)
        assert torch.equal(output, fresh(x, 3))


@share_of_examples(0.3)
@given(data=st.data(), strategy=st.sampled_from(STRATEGIES))
def test_waits_hold_any_training_together(data: st.DataObject, strategy: str) -> None:
    ranks = {"ranks": ("meshes",), "shards": 2} if "HYBRID" in strategy else {}
    training = data.draw(trainings(strategy=strategy, **ranks))
    assert recorded(Trains(training.setup, training.tree, training.steps), RecordingStreams()) == []
