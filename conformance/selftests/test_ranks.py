"""Pool of ranks: results of cases, effects of faults, and cleanup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.judge.sandbox.marked_processes import marked_processes
from conformance.ranks import PoolBroken, RankFault, RankHung, RankPool, RankRaised
from conformance.ranks.collective_traces import Collective
from conformance.ranks.failing_programs import EXPECTED, deadline_s
from conformance.ranks.pool import _Pace
from conformance.selftests.processes import left_processes, run_fresh_python
from conformance.selftests.rank_leaks import CASES, WORLD_SIZES, wait_for_death


@pytest.fixture(scope="module")
def pools() -> Generator[dict[int, RankPool]]:
    pools_by_size = {
        size: RankPool(size, turns=os.environ.get("PYTEST_XDIST_TESTRUNUID")) for size in WORLD_SIZES
    }
    yield pools_by_size
    for pool in pools_by_size.values():
        pool.close()


@pytest.fixture
def pair(pools: dict[int, RankPool]) -> RankPool:
    pools[2].new_test()
    return pools[2]


def fault_of(pool: RankPool, fault: str, where: int = 1) -> RankFault:
    with pytest.raises(RankFault) as caught:
        pool.run(f"{CASES}:{fault}", where=where, deadline_s=deadline_s(fault))
    return caught.value


# Results of a case


@pytest.mark.parametrize("op", ["SUM", "MAX"])
@pytest.mark.parametrize("group_size", WORLD_SIZES)
def test_all_reduce_gives_every_rank_what_the_parent_computes(
    pools: dict[int, RankPool], group_size: int, op: str
) -> None:
    values = [torch.arange(5, dtype=torch.bfloat16) * (rank + 1) - 4 for rank in range(group_size)]
    expected = {"SUM": torch.stack(values).sum(0), "MAX": torch.stack(values).amax(0)}[op]
    results = pools[group_size].run(f"{CASES}:all_reduce", values=values, op=op)
    assert len(results) == group_size
    for actual in results:
        assert actual.dtype == torch.bfloat16
        assert torch.equal(actual, expected)


def test_arguments_and_results_may_have_any_length(pair: RankPool) -> None:
    value = {"small": 1, "large": torch.arange(1 << 21), "text": "é" * 70_000}
    for actual in pair.run(f"{CASES}:echo", value=value):
        assert torch.equal(actual.pop("large"), value["large"])
        assert actual == {"small": 1, "text": value["text"]}


def test_ranks_and_cases_begin_with_the_same_random_numbers(pair: RankPool) -> None:
    first = pair.run(f"{CASES}:random_numbers")
    assert first[0] == first[1]
    assert pair.run(f"{CASES}:random_numbers") == first


def test_collectives_are_recorded(pair: RankPool) -> None:
    pair.run(f"{CASES}:healthy")
    expected = Collective("allreduce_", "0", (0, 1), (("float32", 1),), reduce_op="SUM")
    assert [list(trace) for trace in pair.traces] == [[expected], [expected]]


def test_successful_cases_leak_no_file(pair: RankPool) -> None:
    pair.run(f"{CASES}:healthy")
    before, starts = pair.run(f"{CASES}:open_files"), pair.starts
    for _ in range(100):
        pair.run(f"{CASES}:healthy")
    assert pair.run(f"{CASES}:open_files") == before
    assert pair.starts == starts


def test_ranks_are_warmed_up_at_every_start() -> None:
    with RankPool(2, warm_up=(f"{CASES}:remember", {"value": 5})) as pool:
        assert pool.run(f"{CASES}:recall") == [[5], [5]]
        pool.run(f"{CASES}:remember", value=6)
        assert pool.run(f"{CASES}:recall") == [[5, 6], [5, 6]]
        pool.kill()
        assert pool.run(f"{CASES}:recall") == [[5], [5]]


# Effects of faults


@pytest.mark.parametrize("fault", [fault for fault, kind in EXPECTED.items() if kind])
@pytest.mark.parametrize("group_size", [2, 3])
def test_fault_is_reported_and_the_next_case_is_right(
    pools: dict[int, RankPool], group_size: int, fault: str
) -> None:
    pool = pools[group_size]
    pool.new_test()
    error = fault_of(pool, fault)
    assert type(error) is EXPECTED[fault], error
    assert fault in str(error)
    assert pool.process_ids() == []
    assert pool.run(f"{CASES}:healthy") == [group_size * (group_size + 1) / 2] * group_size


@pytest.mark.parametrize("fault", [fault for fault, kind in EXPECTED.items() if kind is None])
def test_harmless_case_does_not_affect_later_cases(pair: RankPool, fault: str) -> None:
    pair.run(f"{CASES}:{fault}", where=1)
    if fault == "dies_later":
        wait_for_death(pair)
    assert pair.run(f"{CASES}:healthy") == [3.0, 3.0]


@pytest.mark.parametrize("where", [0, 1, 2])
def test_cause_is_distinguished_from_errors_of_peers(pools: dict[int, RankPool], where: int) -> None:
    error = fault_of(pools[3], "raises", where)
    assert error.record.failures[0].rank == where
    assert {failure.rank for failure in error.record.failures} == {0, 1, 2}
    assert str(error).startswith(f"rank {where} raised ValueError: injected into rank {where}\n")
    assert all("Traceback" in failure.traceback for failure in error.record.failures)
    died = fault_of(pools[3], "segfaults", where)
    assert str(died).startswith(f"rank {where} died: killed by SIGSEGV\n")


def test_hang_shows_position_of_every_rank(pair: RankPool) -> None:
    with pytest.raises(RankHung) as caught:
        pair.run(f"{CASES}:sleeps", where=1, deadline_s=3.0)  # time enough for both to come where they hang
    error = caught.value
    assert "in sleeps" in error.record.stacks[1].splitlines()[1]
    assert "in all_reduce" in error.record.stacks[0]
    assert "in healthy" in error.record.stacks[0]


def test_last_words_are_kept_and_bounded(pair: RankPool) -> None:
    assert "the last words" in fault_of(pair, "talks_and_raises").record.outputs[1]
    with pytest.raises(RankHung) as caught:
        pair.run(f"{CASES}:talks_without_end", where=1, deadline_s=0.5)
    assert 10_000 < len(caught.value.record.outputs[1]) <= 20_000


def test_diverging_collectives_are_reported_before_deadline(pair: RankPool) -> None:
    assert str(fault_of(pair, "mismatched_collective")).splitlines()[:3] == [
        "collective 0 of group '0' differs:",
        "  rank 0: allreduce(float32[3]; SUM; ranks [0, 1])",
        "  rank 1: broadcast(float32[3]; root 0; ranks [0, 1])",
    ]
    assert "rank 1: none, its case ended after 0" in str(fault_of(pair, "skips_a_collective"))


@pytest.mark.parametrize("fault", ["leaves_torch_changed", "leaves_groups"])
def test_changed_state_restarts_ranks(pair: RankPool, fault: str) -> None:
    first = pair.run(f"{CASES}:{fault}", where=0)
    starts = pair.starts
    assert pair.run(f"{CASES}:{fault}", where=0) == first
    assert pair.starts == starts + 1


def test_mesh_and_groups_outlive_case(pair: RankPool) -> None:
    first = pair.run(f"{CASES}:sums_over_a_mesh")
    starts = pair.starts
    assert pair.run(f"{CASES}:sums_over_a_mesh") == first == [3.0, 3.0]
    assert pair.starts == starts


def test_importing_is_not_counted_but_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        f"import time; time.sleep(1.0)\nfrom {CASES} import healthy\n"
    )
    (tmp_path / "never_imported.py").write_text("import time; time.sleep(3600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RankPool(2) as pool:
        assert pool.run("slow_to_import:healthy", deadline_s=0.9) == [3.0, 3.0]
    with (
        RankPool(1, start_s=4.0) as pool,
        pytest.raises(RankHung, match="importing the case's module after 4 s"),
    ):
        pool.run("never_imported:healthy")


@pytest.mark.parametrize(
    ("name", "kind"), [("no_such_module:case", "ModuleNotFoundError"), (f"{CASES}:no_such", "AttributeError")]
)
def test_unknown_case_raises(pair: RankPool, name: str, kind: str) -> None:
    with pytest.raises(RankRaised, match=kind):
        pair.run(name)


def test_failed_start_of_ranks_is_distinguished_from_fault_of_case() -> None:
    with RankPool(2, backend="no_such_backend") as pool, pytest.raises(PoolBroken, match="no_such_backend"):
        pool.run(f"{CASES}:healthy")


def test_closed_pool_raises() -> None:
    with RankPool(1) as pool:
        assert pool.run(f"{CASES}:healthy") == [1.0]
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(f"{CASES}:healthy")
    with pytest.raises(ValueError, match="world_size is 0"):
        RankPool(0)


# Hangs under Hypothesis.


def test_hang_is_shrunk_and_confirmed_with_full_deadline(pair: RankPool) -> None:
    @settings(max_examples=100, database=None, derandomize=True)
    @given(size=st.integers(0, 1000))
    def hangs(size: int) -> None:
        assert pair.run(f"{CASES}:hangs_from", size=size, least=17, deadline_s=2.0) == [size, size]

    with pytest.raises(RankHung, match="after 2 s") as caught:
        hangs()
    assert "size=17," in "".join(caught.value.__notes__)


def test_pace_suspects_quickly_and_confirms_slowly() -> None:
    pace = _Pace()
    assert pace.limit_s(b"a", 30.0) == 30.0
    pace.note_success(0.5)
    pace.note_hang(b"a")
    assert pace.limit_s(b"b", 30.0) == 10.0  # twenty times what is typical
    assert pace.limit_s(b"a", 30.0) == 10.0  # known to hang
    pace.note_hang(b"b")
    assert pace.limit_s(b"b", 30.0) == 30.0  # come again: to be confirmed
    pace.note_hang(b"b")
    assert pace.limit_s(b"b", 30.0) == 10.0
    assert pace.limit_s(b"c", 5.0) == 5.0


# Ends that come from outside.

HANGING_PARENT = """
import sys
from conformance.ranks import RankPool
pool = RankPool(2)
pool.run("conformance.ranks.failing_programs:healthy")
print("up", flush=True)
pool.run("conformance.ranks.failing_programs:holds_pythons_lock", where=1, deadline_s=60)
"""


@pytest.mark.parametrize(
    "blow",
    [
        signal.SIGKILL,
        *(
            pytest.param(signal_number, marks=pytest.mark.profile("full"))
            for signal_number in (signal.SIGTERM, signal.SIGINT)
        ),
    ],
)
def test_no_rank_outlives_its_parent(blow: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", HANGING_PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TANDEM_MARK": mark, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        time.sleep(0.3)  # time to enter the case
        assert len(marked_processes(f"TANDEM_MARK={mark}")) >= 4  # parent, fork server, two ranks
        os.killpg(parent.pid, blow)
        parent.wait(90)
    assert left_processes(f"TANDEM_MARK={mark}") == []


def test_interrupted_case_leaves_usable_pool(pair: RankPool) -> None:
    pair.run(f"{CASES}:healthy")
    ids = pair.process_ids()

    class Interrupt(BaseException):
        pass

    def strike(signum: int, frame: object) -> None:
        raise Interrupt

    # Not the alarm: the test's own deadline uses that.
    previous = signal.signal(signal.SIGUSR2, strike)
    try:
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR2]).start()
        with pytest.raises(Interrupt):
            pair.run(f"{CASES}:sleeps", where=1, deadline_s=60)
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ids)
    assert pair.run(f"{CASES}:healthy") == [3.0, 3.0]


def test_many_faults_leave_nothing_behind() -> None:
    # A short path: sockets lie in it, whose names have room for about a hundred characters.
    with tempfile.TemporaryDirectory() as folder:
        environment = {"TMPDIR": folder, "TANDEM_MARK": uuid.uuid4().hex}
        done = run_fresh_python("-W", "ignore", "-m", "conformance.selftests.rank_leaks", 30, **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"between cases": {}, "at the end": {}}
