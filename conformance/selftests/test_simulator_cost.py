"""The cost model: schedules, overlap and memory computed by hand; and what it says of the real sharding."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance.ranks.fixtures import require_simulator
from conformance.selftests.processes import LIMIT_S, run_python
from conformance.simulator.cost.durations import bytes_of, flops_of, hardware
from conformance.simulator.cost.timeline import schedule, step_cost
from conformance.simulator.cost.trace import MARK, Entry

_UNITS = 5  # four layers and the root
SECONDS = {"a": 2.0, "b": 3.0, "all_gather": 5.0, "c": 1.0}

pytestmark = pytest.mark.deadline(LIMIT_S + 60)


def run(name: str, stream: int = 0) -> Entry:
    return Entry("run", name, stream)


def record(number: int, stream: int = 0) -> Entry:
    return Entry("record", stream=stream, number=number)


def wait(number: int, stream: int = 0) -> Entry:
    return Entry("wait", stream=stream, number=number)


def scheduled(*entries: Entry, host_s: float = 0.0):
    end = [record(-1), Entry("host_wait", number=-1), record(-2, 1), Entry("host_wait", number=-2, stream=1)]
    every = [Entry(MARK), *entries, *end, Entry(MARK)]
    return schedule(every, lambda entry: SECONDS[entry.name], host_s)


def test_five_operators_on_two_streams() -> None:
    # stream 0  a a . . . . . b b b c        b waits for the gather, which waits for nothing
    timeline = scheduled(
        run("all_gather", 1), record(1, 1), run("a"), run("a", 1), wait(1), run("b"), run("c")
    )
    assert [(span.stream, span.begin, span.end) for span in timeline.spans] == [
        (1, 0, 5),
        (0, 0, 2),
        (1, 5, 7),
        (0, 5, 8),
        (0, 8, 9),
    ]
    cost = step_cost(timeline)
    assert (cost.seconds, cost.computing_s, cost.communicating_s, cost.exposed_s) == (9, 6, 5, 3)


def test_earlier_gather_is_hidden() -> None:
    early = step_cost(scheduled(run("all_gather", 1), record(1, 1), run("b"), run("b"), wait(1), run("a")))
    late = step_cost(
        scheduled(
            run("b"), run("b"), record(2), wait(2, 1), run("all_gather", 1), record(1, 1), wait(1), run("a")
        )
    )
    assert (early.exposed_s, early.seconds) == (0, 8)
    assert (late.exposed_s, late.seconds) == (5, 13)


def test_host_issues_in_order_and_waits() -> None:
    timeline = scheduled(
        run("a"), record(1), run("c", 1), Entry("host_wait", number=1), run("c", 1), host_s=4.0
    )
    assert [(span.begin, span.end) for span in timeline.spans] == [(4, 6), (8, 9), (12, 13)]
    timeline = scheduled(run("b"), record(1), Entry("host_wait", number=1), run("c", 1), host_s=1.0)
    assert timeline.spans[-1].begin == 5


def test_freed_memory_stays_allocated_while_other_stream_uses_it() -> None:
    def peak(*recorded: Entry) -> int:
        return step_cost(
            scheduled(
                Entry("allocate", number=512, writes=100),
                run("all_gather", 1),
                *recorded,
                Entry("free", number=512),
                Entry("allocate", number=1024, writes=70),
                host_s=1.0,
            )
        ).allocated_bytes

    assert peak() == 100
    assert peak(Entry("use", number=512, stream=1)) == 170


def test_durations_of_operators() -> None:
    on = hardware("h100")
    product = Entry("run", "aten::mm", sizes=[[4096, 8192], [8192, 1024]], reads=8, writes=8)
    assert flops_of(product) == 2 * 4096 * 8192 * 1024
    reached = 989.4e12 * on.kernels["product_efficiency"]
    assert on.seconds(product) == pytest.approx(2 * 4096 * 8192 * 1024 / reached + 2e-6)
    assert bytes_of(Entry("run", "aten::add_", reads=3, writes=5)) == 13
    assert bytes_of(Entry("run", "aten::zero_", writes=5)) == 5
    assert bytes_of(Entry("run", "aten::add", reads=3, writes=5)) == 8
    assert bytes_of(Entry("run", "copy_", reads=4, writes=2)) == 6
    assert bytes_of(Entry("run", "copy_", reads=80, writes=2)) == 4
    copy = Entry("run", "copy_", reads=3_350_000, writes=3_350_000)
    assert on.seconds(copy) == pytest.approx(2e-6 / 0.9 + 2e-6)


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [(1, 8.4e-6), (8, 8.4e-6 + 7 * 3.4e-6 + 7e-3), (16, 8.4e-6 + 14 * 3.4e-6 + 14e-6 + 7.5e-3)],
)
def test_ring_takes_one_hop_per_rank(ranks: int, seconds: float) -> None:
    gathered = Entry("run", "all_gather", writes=int(8e-3 * 370.8e9), sizes=[[ranks]])
    assert hardware("h100").seconds(gathered) == pytest.approx(seconds)


def test_unknown_accelerator_raises() -> None:
    with pytest.raises(ValueError, match=r"got accelerator 'abacus', but hardware.toml has h100_96gb"):
        hardware("abacus")


@pytest.fixture(scope="module")
def costs() -> dict[str, dict[str, Any]]:
    require_simulator()
    ended = run_python("-m", "conformance.selftests.simulator_costs")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_device_reports_work_of_program(costs: dict[str, dict[str, Any]]) -> None:
    known, on = costs["known"], hardware("h100")
    mib = 1 << 20
    bandwidth, latency, host = 3.35e12 * 0.9, on.kernels["latency_s"], on.host_s
    gather = 8.4e-6 + 7 * 3.4e-6 + 448 * mib / 370.8e9
    add = 2 * 64 * mib / bandwidth + latency
    doubled = add + (64 * mib + 4) / bandwidth + latency  # and summed, which the host waits for
    # The host waits before each of its two reads.
    assert known["seconds"] == pytest.approx(host + add + doubled + host + gather + add)
    assert known["communicating_s"] == pytest.approx(gather)
    assert known["exposed_s"] == pytest.approx(gather - 4 * add)
    assert known["allocated_bytes"] == (64 + 64 + 512) * mib
    assert known["reserved"] == (64 + 64 + 64 + 512) * mib + 2 * mib  # the sum is of the small ones


SUBJECTS = pytest.mark.parametrize(
    "subject", ["torch fully_shard", "impl fully_shard", "torch FSDP", "impl FSDP"]
)


@SUBJECTS
def test_first_gather_of_backward_does_not_wait_for_end_of_forward(
    costs: dict[str, dict[str, Any]], subject: str
) -> None:
    begins = costs[subject]["gathers"]
    assert begins[: _UNITS + 1] == [0.0] * (_UNITS + 1)
    assert begins[-1] == 1.0


@SUBJECTS
def test_reduce_scatter_does_not_wait_for_all_reduce_before(
    costs: dict[str, dict[str, Any]], subject: str
) -> None:
    assert costs[subject]["scatters"] == [0.0] * _UNITS


@SUBJECTS
def test_sharding_gathers_while_it_computes(costs: dict[str, dict[str, Any]], subject: str) -> None:
    cost = costs[subject]
    assert 0 < cost["exposed_s"] < cost["communicating_s"]
    assert cost["seconds"] >= cost["computing_s"] + cost["exposed_s"]
    assert cost["allocated_bytes"] <= cost["reserved"]


def test_gather_without_prefetch_is_exposed(costs: dict[str, dict[str, Any]]) -> None:
    prefetched, alone = costs["torch FSDP"], costs["nothing prefetched"]
    assert alone["exposed_s"] > prefetched["exposed_s"]
    assert alone["seconds"] > prefetched["seconds"]
