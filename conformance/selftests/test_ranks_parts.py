"""Components of rank pools: agreement of traces, channels, stacks, and slots that processes share."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.rank_errors import Failure
from conformance.ranks import by_value
from conformance.ranks.channel import Channel
from conformance.ranks.collective_traces import Collective, CollectiveTraces
from conformance.ranks.handle import RankHandle
from conformance.ranks.pool import _Progress
from conformance.ranks.slots import cpu_slots
from conformance.selftests.processes import run_fresh_python


def a_call(
    name: str = "allreduce_", group: str = "0", members: tuple[int, ...] = (0, 1, 2), **other: int
) -> Collective:
    return Collective(name, group, members, (("float32", 4),), **other)


GROUPS = {"0": (0, 1, 2), "left": (0, 1), "right": (1, 2)}
programs = st.lists(
    st.tuples(st.sampled_from(["allreduce_", "broadcast_"]), st.sampled_from(list(GROUPS))),
    min_size=1,
    max_size=12,
).map(lambda calls: [a_call(name, group, GROUPS[group]) for name, group in calls])


def played(
    program: list[Collective], order: st.DataObject, changed: dict[int, list[Collective]]
) -> CollectiveTraces:
    """Return the traces of ranks that issue their calls of the program, or those of `changed`, in a drawn order."""
    traces = CollectiveTraces(3)
    left = {rank: [call for call in program if rank in call.members] for rank in range(3)} | changed
    going = [0, 1, 2]
    while going:
        rank = order.draw(st.sampled_from(going))
        if left[rank]:
            traces.add(rank, left[rank].pop(0))
        else:
            traces.end_case(rank)
            going.remove(rank)
    return traces


@given(program=programs, order=st.data())
def test_equal_programs_agree_in_any_order(program: list[Collective], order: st.DataObject) -> None:
    assert played(program, order, {}).divergence == ""


@given(program=programs, order=st.data(), is_dropped=st.booleans())
def test_dropped_or_changed_call_is_always_detected(
    program: list[Collective], order: st.DataObject, is_dropped: bool
) -> None:
    index = order.draw(st.integers(0, len(program) - 1))
    call = program[index]
    rank = order.draw(st.sampled_from(call.members))
    instead = [] if is_dropped else [a_call("barrier", call.group, call.members)]
    altered = [*program[:index], *instead, *program[index + 1 :]]
    own_calls = [call for call in altered if rank in call.members]
    divergence = played(program, order, {rank: own_calls}).divergence
    assert f"of group {call.group!r} differs" in divergence
    assert f"rank {rank}: " in divergence


@pytest.mark.parametrize("raised_ns", [15, 25])
def test_error_of_diverging_ranks_is_echo(raised_ns: int) -> None:
    progress = _Progress(2)
    failure = Failure(0, "RuntimeError", "connection closed", "", when_ns=raised_ns)
    for rank, message in (
        (0, a_call("allreduce_", members=(0, 1), when_ns=10)),
        (0, failure),
        (1, a_call("broadcast_", members=(0, 1), when_ns=20)),
    ):
        progress.take(rank, message)
    assert progress.is_over
    assert progress.has_diverged_first is (raised_ns == 25)


@given(messages=st.lists(st.binary(max_size=300_000), max_size=4))
def test_channel_keeps_messages_whole(messages: list[bytes]) -> None:
    sender_end, other = (Channel(end) for end in socket.socketpair())
    sender = threading.Thread(target=lambda: [sender_end.send(message) for message in messages])
    sender.start()
    actual: list[bytes] = []
    while len(actual) < len(messages):
        arrived, is_open = other.receive_available()
        assert is_open
        actual += arrived
    sender.join()
    sender_end.close()
    assert actual == messages
    assert other.receive_available() == ([], False)
    other.close()


_MATRIX = torch.tensor([[0.0, -0.0, torch.nan], [torch.inf, 1e-40, 2.5]])
RESULTS = {
    **{
        str(dtype): _MATRIX.to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    },
    "integers": torch.arange(-3, 3),
    "booleans": torch.tensor([[True], [False]]),
    "no elements": torch.empty(0, 4),
    "one number": torch.tensor(3.5),
    "a part": torch.arange(10.0)[2:5],
    "transposed": _MATRIX.t(),
    "conjugated": _MATRIX.to(torch.complex64).conj(),
    "to be trained": torch.ones(3, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "sparse": torch.eye(3).to_sparse(),
    "on no device": torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("tensor", RESULTS.values(), ids=RESULTS)
def test_tensor_round_trip(tensor: torch.Tensor) -> None:
    first, second = pickle.loads(by_value.dumps({"nested": [tensor, tensor]}))["nested"]
    assert first is second
    assert type(first) is type(tensor)
    for attribute in ("dtype", "shape", "layout", "device", "requires_grad"):
        assert getattr(first, attribute) == getattr(tensor, attribute), attribute
    if not tensor.is_meta and tensor.layout is torch.strided:
        assert first.stride() == tensor.stride()
        bits = [
            compared.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
            for compared in (first, tensor)
        ]
        assert torch.equal(*bits)


def test_stack_with_pauses_is_read_completely() -> None:
    stacks, reported = multiprocessing.Pipe(duplex=False)
    not_asked: Any = None
    handle = RankHandle(0, not_asked, not_asked, not_asked, stacks, not_asked)
    frames = ["Thread 0x1 (most recent call first):"]
    frames += [f'  File "{name}", line 1 in {name}' for name in ("a", "b")] + [
        '  File "<string>", line 1 in <module>'
    ]

    def tell() -> None:
        for frame in frames:
            os.write(reported.fileno(), f"{frame}\n".encode())
            time.sleep(0.1)

    telling = threading.Thread(target=tell)
    telling.start()
    assert handle.stack().splitlines() == frames
    telling.join()
    stacks.close()
    reported.close()


def test_send_without_reader_times_out() -> None:
    first, other = (Channel(end) for end in socket.socketpair())
    with pytest.raises(TimeoutError):
        first.send(b"x" * (1 << 24), timeout_s=0.05)
    first.close()
    other.close()


@given(expected=st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_held_slots_never_exceed_capacity(expected: list[int]) -> None:
    capacity, family = 3, uuid.uuid4().hex
    held, most, counts, lock = 0, 0, [], threading.Lock()

    def work(slots: int) -> None:
        nonlocal held, most
        with cpu_slots(slots, family, capacity=capacity, patience_s=60) as count:
            with lock:
                counts.append(count)
                held += count
                most = max(most, held)
            time.sleep(0.001)
            with lock:
                held -= count

    threads = [threading.Thread(target=work, args=(slots,)) for slots in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == sorted(min(slots, capacity) for slots in expected)
    assert (held, most <= capacity) == (0, True)


HOLDER = """
import sys, time
from conformance.ranks.slots import cpu_slots
with cpu_slots(1, sys.argv[1], capacity=1):
    print(flush=True)
    time.sleep(3600)
"""


def test_slot_is_released_by_its_holder() -> None:
    family = uuid.uuid4().hex
    python_path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, family], stdout=subprocess.PIPE, env=python_path
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with cpu_slots(1, family, capacity=1, patience_s=0.05) as count:
            assert count == 0  # out of patience
        holder.kill()
    with cpu_slots(1, family, capacity=1) as count:
        assert count == 1


BROUGHT = """
import importlib, sys
from pathlib import Path
from conformance.ranks.handle import _CASE_MODULES

names = [".".join(path.with_suffix("").parts) for path in sorted(Path("conformance").rglob("*.py"))]
for name in filter(_CASE_MODULES.fullmatch, names):
    importlib.import_module(name)
print([name for name in sys.modules if name.split(".")[0] == "impl"])
"""


def test_modules_of_cases_import_no_subject() -> None:
    ended = run_fresh_python("-c", BROUGHT)
    assert ended.stdout == "[]\n", ended.stderr
