"""The judge of streams, on logs written by hand: with each wait that is needed, and without it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.distributed.fsdp.tests.happens_before import (
    HOST,
    Allocation,
    Entry,
    Free,
    HostBlock,
    Operation,
    Record,
    Wait,
    hazards,
)

WHOLE, SHARD, GRAD, BUFFER, OTHER = range(5)

# Correct logs, with the index of an entry that must not be missing, and the hazard that is reported without it.
LOGS: dict[str, tuple[Sequence[Entry], int, str]] = {
    "a whole is read before its gather has filled it": (
        (
            Operation("gather", "all_gather", writes=(WHOLE,)),
            Record("gather", 1),
            Wait("compute", 1),
            Operation("compute", "matmul", reads=(WHOLE,)),
        ),
        2,
        "matmul (compute) reads buffer 0 without waiting for all_gather (gather)",
    ),
    "a whole is filled again before its last use": (
        (
            Operation("compute", "matmul", reads=(WHOLE,)),
            Record("compute", 1),
            Wait("gather", 1),
            Operation("gather", "all_gather", writes=(WHOLE,)),
        ),
        2,
        "all_gather (gather) writes buffer 0 without waiting for matmul (compute)",
    ),
    "memory is given away before its last use in another stream": (
        (
            Allocation("gather", WHOLE),
            Operation("compute", "matmul", reads=(WHOLE,)),
            Record("compute", 1),
            Free(WHOLE),
            Wait("gather", 1),
            Allocation("gather", OTHER),
        ),
        4,
        "buffer 4 may get the memory of buffer 0 before matmul (compute) is done with it",
    ),
    "gradients are reduced before they are joined": (
        (
            Operation("compute", "join", reads=(GRAD,), writes=(BUFFER,)),
            Record("compute", 1),
            Wait("reduce", 1),
            Operation("reduce", "reduce_scatter", reads=(BUFFER,)),
        ),
        2,
        "reduce_scatter (reduce) reads buffer 3 without waiting for join (compute)",
    ),
    "a buffer of gradients is dropped before it is reduced": (
        (
            Allocation("compute", BUFFER),
            Record("compute", 1),
            Wait("reduce", 1),
            Operation("reduce", "reduce_scatter", reads=(BUFFER,)),
            Record("reduce", 2),
            Wait("compute", 2),
            Free(BUFFER),
            Allocation("compute", OTHER),
        ),
        5,
        "buffer 4 may get the memory of buffer 3 before reduce_scatter (reduce) is done with it",
    ),
    "the optimizer steps before gradients are reduced": (
        (
            Operation("reduce", "reduce_scatter", writes=(GRAD,)),
            Record("reduce", 1),
            Wait("compute", 1),
            Operation("compute", "step", reads=(GRAD,), writes=(SHARD,)),
        ),
        2,
        "step (compute) reads buffer 2 without waiting for reduce_scatter (reduce)",
    ),
    "a shard is gathered before it is stepped": (
        (
            Operation("compute", "step", writes=(SHARD,)),
            Record("compute", 1),
            Wait("gather", 1),
            Operation("gather", "all_gather", reads=(SHARD,), writes=(WHOLE,)),
        ),
        2,
        "all_gather (gather) reads buffer 1 without waiting for step (compute)",
    ),
    "the host reads what is still being copied to it": (
        (
            Operation("compute", "copy", writes=(GRAD,)),
            Record("compute", 1),
            HostBlock(1),
            Operation(HOST, "step", reads=(GRAD,)),
        ),
        2,
        "step (host) reads buffer 2 without waiting for copy (compute)",
    ),
    "memory is used that is freed": (
        (
            Allocation("gather", WHOLE),
            Free(WHOLE),
            Allocation("gather", WHOLE),
            Operation("gather", "all_gather", writes=(WHOLE,)),
        ),
        2,
        "all_gather (gather) uses buffer 0 after it was freed",
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_complete_log_has_no_hazard(name: str) -> None:
    log, _, _ = LOGS[name]
    assert hazards(log) == []


@pytest.mark.parametrize("name", LOGS)
def test_log_without_wait_has_hazard(name: str) -> None:
    log, needed, reported = LOGS[name]
    assert hazards([*log[:needed], *log[needed + 1 :]]) == [reported]


@pytest.mark.parametrize(
    "name",
    [n for n, (log, _, _) in LOGS.items() if isinstance(log[0], Operation) and isinstance(log[1], Record)],
)
def test_early_event_orders_nothing(name: str) -> None:
    log, _, reported = LOGS[name]
    assert hazards([log[1], log[0], *log[2:]]) == [reported]


def test_waits_lead_on() -> None:
    """Waits order the first of three streams before the second, and the second before the third."""
    log = [
        Operation("gather", "all_gather", writes=(WHOLE,)),
        Record("gather", 1),
        Wait("compute", 1),
        Record("compute", 2),
        Wait("reduce", 2),
        Operation("reduce", "reads", reads=(WHOLE,)),
    ]
    assert hazards(log) == []
    assert len(hazards([entry for entry in log if entry != Wait("compute", 1)])) == 1


def test_host_wait_orders_later_work() -> None:
    before = [Operation("gather", "all_gather", writes=(WHOLE,)), Record("gather", 1)]
    reads = Operation("compute", "matmul", reads=(WHOLE,))
    assert hazards([*before, HostBlock(1), reads]) == []
    assert len(hazards([*before, reads, HostBlock(1)])) == 1


def test_reads_beside_each_other_are_no_hazard() -> None:
    assert (
        hazards([Operation(stream, "reads", reads=(SHARD,)) for stream in ("gather", "compute", HOST)]) == []
    )


def test_memory_goes_back_to_the_lane_that_it_was_allocated_in() -> None:
    used = [Allocation("gather", WHOLE), Operation("compute", "matmul", reads=(WHOLE,)), Free(WHOLE)]
    assert hazards([*used, Allocation("compute", OTHER), Allocation("reduce", BUFFER)]) == []
    assert len(hazards([*used, Allocation("gather", OTHER)])) == 1


@given(
    st.lists(
        st.builds(
            Operation,
            st.sampled_from(["compute", "gather"]),
            st.just("uses"),
            st.lists(st.integers(0, 3), max_size=2).map(tuple),
            st.lists(st.integers(0, 3), max_size=2).map(tuple),
        )
    )
)
def test_lanes_that_wait_after_each_operation_are_as_one(operations: list[Operation]) -> None:
    """Each sequence of operations is clean in one stream, or if every stream waits for every operation."""
    assert (
        hazards(
            [
                Operation("compute", operation.name, operation.reads, operation.writes)
                for operation in operations
            ]
        )
        == []
    )
    held: list[Entry] = []
    for event, operation in enumerate(operations):
        held += [operation, Record(operation.stream, event), Wait("compute", event), Wait("gather", event)]
    assert hazards(held) == []
