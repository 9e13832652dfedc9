"""Messages between ranks on the simulated accelerator, and the pipelines of torch that send them."""

from __future__ import annotations

import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance.selftests.processes import ROOT, run_python
from conformance.selftests.simulator_runs import simulate, simulate_source

MESSAGES = ROOT / "conformance/selftests/simulator_messages.py"
PIPELINES = ROOT / "conformance/selftests/simulator_pipelines.py"
LIMIT_S = 120  # time limit of one schedule

pytestmark = pytest.mark.deadline(560.0)


def line_of(text: str, after: str) -> int:
    """Return the number of the first line with `text` in or below the function `after`."""
    lines = MESSAGES.read_text().splitlines()
    start = lines.index(next(line for line in lines if line.startswith(f"def {after}(")))
    return next(number for number, line in enumerate(lines, 1) if number > start and text in line)


def run_programs(*names: str, words: tuple[object, ...], ranks: int = 2, cwd: Path) -> tuple[int, str]:
    return simulate(MESSAGES, "--ranks", ranks, "--timeout", LIMIT_S, *words, "--", *names, cwd=cwd)


def run_side_by_side(
    names: Collection[str], words: tuple[object, ...], cwd: Path
) -> dict[str, tuple[int, str]]:
    """Run each program by itself, all at the same time, because they mostly wait."""
    with ThreadPoolExecutor(len(names)) as pool:
        ends = pool.map(lambda name: run_programs(name, words=words, cwd=cwd), names)
        return dict(zip(names, ends, strict=True))


@pytest.mark.parametrize(
    ("names", "ranks", "tensors"),
    [
        (("every_call", "host_memory", "larger_than_a_piece", "receive_before_all_reduce"), 2, 18),
        (("coalesced_all_reduces", "send_after_a_failed_batch"), 2, 6),
        (("ring", "answer_through_a_third_rank"), 3, 6),
    ],
    ids=["two ranks", "coalesced", "three ranks"],
)
def test_right_messages_have_one_result(
    tmp_path: Path, names: tuple[str, ...], ranks: int, tensors: int
) -> None:
    status, report = run_programs(*names, words=("--seeds", 6), ranks=ranks, cwd=tmp_path)
    assert f"in its own order, exit status 0, {tensors} tensors saved" in report, report
    assert "0 of 5 schedules change the result; 0 hazards" in report, report
    assert "not replayable" not in report, report
    assert "two runs of the same schedule" not in report, report
    assert status == 0


def test_host_goes_on_without_a_message_that_is_sent_later(tmp_path: Path) -> None:
    # Not replayable, because the clock decides when the host goes on.
    tensors = {"receive_over_a_barrier": 2, "query_before_the_send": 4}
    ends = run_side_by_side(tensors, words=("--seeds", 6, "--jobs", 6), cwd=tmp_path)
    for name, (status, report) in ends.items():
        assert f"in its own order, exit status 0, {tensors[name]} tensors saved" in report, report
        assert "0 of 5 schedules change the result; 0 hazards" in report, report
        assert status == 0


# By program: what ranks 0 and 1 print.
ARRIVED = {
    "every_call": (
        ["[10.0, 13.0, 16.0, 19.0]", "[11.0, 12.0, 13.0, 14.0]", "[15.0, 16.0, 17.0, 18.0]", "[17, 18]"],
        ["[0.0, 2.0, 4.0, 6.0]", "[1.0, 2.0, 3.0, 4.0]", "[5.0, 6.0, 7.0, 8.0]", "[7, 8]"],
    ),
    "scaled_sums": (["[5.0, 6.0, 7.0, 8.0]", "[5.0, 6.0]"], ["[5.0, 6.0, 7.0, 8.0]", "[7.0, 8.0]"]),
}


@pytest.mark.parametrize("name", ARRIVED)
def test_messages_arrive_as_sent(tmp_path: Path, name: str) -> None:
    _, report = run_programs(name, words=("--seed", 5), cwd=tmp_path)
    expected = [f"rank {rank}: {text}" for rank, texts in enumerate(ARRIVED[name]) for text in texts]
    assert report.splitlines()[: len(expected)] == expected


@pytest.mark.parametrize(
    ("name", "now", "before"),
    [
        (
            "sent_memory_is_overwritten",
            ("aten::fill_ writes", "x.fill_(5)"),
            ("send to rank 1 reads", "dist.isend"),
        ),
        (
            "received_memory_is_read",
            ("aten::mul reads", "received * 2"),
            ("recv from rank 0 writes", "dist.irecv"),
        ),
        ("batched_memory_is_read", ("aten::mul reads", "received * 2"), ("writes", "dist.batch_isend_irecv")),
    ],
)
def test_missing_wait_for_a_message_is_found_with_its_line(
    tmp_path: Path, name: str, now: tuple[str, str], before: tuple[str, str]
) -> None:
    status, report = run_programs(name, words=("--seeds", 6), cwd=tmp_path)
    assert status == 1
    assert re.search(
        rf"hazard 1: {now[0]} on .* at \S*simulator_messages.py:{line_of(now[1], name)} {name}\n"
        rf" +what .*{before[0]} on .* at \S*simulator_messages.py:{line_of(before[1], name)} {name}\n",
        report,
    ), report
    assert re.search(r"[1-5] of 5 schedules change the result", report), report


# By program: the operations that ranks 0 and 1 wait in, or an empty text for a rank that has ended.
DEADLOCKS = {
    "both_receive_first": ("recv from rank 1", "recv from rank 0"),
    "send_without_receive": ("send to rank 1, which is not received", ""),
    "receive_without_send": ("recv from rank 1", "barrier"),
    "host_receive_without_send": ("recv from rank 1", "barrier"),
    "host_sum_against_receive": ("all_reduce", "recv from rank 0"),
    "batch_without_send": (
        "batch_isend_irecv (recv from rank 1)",
        "batch_isend_irecv (recv from rank 0)",
    ),
    "receive_against_all_reduce": ("recv from rank 1", "all_reduce"),
    "broadcasts_from_different_ranks": ("broadcast", "broadcast"),
}


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.profile("full")), 5])
def test_deadlock_error_names_waits_of_ranks(tmp_path: Path, seed: int) -> None:
    ends = run_side_by_side(DEADLOCKS, words=("--seed", seed), cwd=tmp_path)
    for name, (status, report) in ends.items():
        assert status == 1, (name, report)
        assert "RuntimeError: sim: no rank can go on:" in report, report
        assert "ended after" not in report, report
        for rank, operation in enumerate(DEADLOCKS[name]):
            line = line_of(f"dist.{operation.partition(' ')[0]}", name)
            state = f"waits in {operation}, called at {MESSAGES}:{line} {name}" if operation else "has ended"
            assert f"  rank {rank} {state}\n" in report, report


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        (
            "tags_in_another_order",
            "expected 16 bytes with tag 2, but the sender's next message has 16 bytes and tag 1",
        ),
        (
            "size_differs",
            "expected 16 bytes with tag 0, but the sender's next message has 12 bytes and tag 0",
        ),
    ],
)
def test_message_that_does_not_match_is_an_error(tmp_path: Path, name: str, difference: str) -> None:
    status, report = run_programs(name, words=("--seed", 1), cwd=tmp_path)
    assert status == 1
    assert f"recv from rank 0 failed on the device: {difference}" in report, report
    assert f"simulator_messages.py:{line_of('dist.recv', name)} {name}" in report, report


def test_batch_of_host_and_device_memory_is_refused(tmp_path: Path) -> None:
    status, report = run_programs("batch_of_host_and_device_memory", words=("--seed", 1), cwd=tmp_path)
    assert status == 1
    assert (
        "a batch got host memory (recv from rank 1) and device memory (send to rank 1), but expected one of the two. "
        "Use a batch for each" in report
    ), report


_THREAD = """
import threading, time
import torch
import torch.distributed as dist

dist.init_process_group("simccl")
x = torch.ones(4, device="sim")

def reduce():
    time.sleep(1)
    dist.all_reduce(x)
    x.sum().item()

if dist.get_rank() == 0:
    threading.Thread(target=reduce, daemon=True).start()
    dist.send(torch.ones(4, device="sim"), 1)
else:
    reduce()
    dist.recv(x, 0)
"""


def test_thread_goes_on_while_its_rank_waits_at_the_end(tmp_path: Path) -> None:
    words = ("--ranks", 2, "--seed", 1, "--timeout", LIMIT_S)
    status, report = simulate_source(_THREAD, *words, cwd=tmp_path)
    assert status == 0, report


_EXIT = """
import torch
import torch.distributed as dist

dist.init_process_group("simccl")
if dist.get_rank() == 0:
    dist.isend(torch.ones(4, device="sim"), 1)
raise SystemExit(0)
"""


def test_script_that_exits_with_0_is_checked_to_its_end(tmp_path: Path) -> None:
    words = ("--ranks", 2, "--seed", 1, "--timeout", LIMIT_S)
    status, report = simulate_source(_EXIT, *words, cwd=tmp_path)
    assert status == 1
    assert "waits in send to rank 1, which is not received" in report, report


SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS")


def test_pipelines_of_torch_have_the_gradients_of_one_device(tmp_path: Path) -> None:
    words = ("--ranks", 2, "--seed", 5, "--timeout", LIMIT_S, "--", *SCHEDULES)
    status, report = simulate(PIPELINES, *words, cwd=tmp_path)
    assert status == 0, report
    assert "hazard" not in report, report
    assert "not replayable" not in report, report


@pytest.mark.profile("full")
def test_pipelines_of_torch_have_one_result(tmp_path: Path) -> None:
    words = ("--ranks", 2, "--seeds", 6, "--timeout", LIMIT_S, "--", *SCHEDULES)
    status, report = simulate(PIPELINES, *words, cwd=tmp_path)
    assert "in its own order, exit status 0, 24 tensors saved" in report, report
    assert "0 of 5 schedules change the result; 0 hazards" in report, report
    assert status == 0


_SAME_SCHEDULE = """
import sys
from conformance.simulator import enable
from conformance.simulator.script import Script, import_shared, run

enable(devices=2)
script = Script(sys.argv[1], ("ScheduleInterleaved1F1B",), ranks=2)
import_shared(script)
print(len({tuple(course.digests) for course in run(script, [0] * 12, jobs=4)}), "courses")
"""


@pytest.mark.profile("full")
def test_pipeline_takes_one_course_for_one_seed(tmp_path: Path) -> None:
    """The thread of a backward frees tensors late. The more processes share the cores, the later it does so."""
    ended = run_python("-c", _SAME_SCHEDULE, PIPELINES, cwd=tmp_path)
    assert ended.stdout == "1 courses\n", ended.stdout + ended.stderr


def test_activations_overwritten_before_send_are_found(tmp_path: Path) -> None:
    words = ("--ranks", 2, "--seeds", 5, "--timeout", LIMIT_S, "--", "ScheduleGPipe", "overwritten")
    status, report = simulate(PIPELINES, *words, cwd=tmp_path)
    assert status == 1
    assert re.search(
        r"aten::zero_ writes on .* at \S*simulator_pipelines.py:\d+ \S*overwriting\n +what send to rank 1 reads on",
        report,
    ), report
