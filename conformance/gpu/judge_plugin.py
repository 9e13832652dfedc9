"""Plugin of the judge's pytest. It writes planned and judged tests, and marks tests that cannot run as unavailable."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from conformance.gpu.judge_order import stage_of
from conformance.gpu.phase_rows import PROGRESS, VARIABLE, PhaseTask, Rows, read_rows
from conformance.gpu.probe import Probe
from conformance.gpu.probed_operations import COLLECTIVES
from conformance.judge.judgement import RED, unavailable
from conformance.ranks import PoolBroken, backend_for

_TELL_EVERY_S = 10.0
_TIMES_WITH_RANKS = 2
# The probes that a test with ranks depends on, by the first pattern that matches its path.
_NEEDS = (
    ("conformance/distributed/.*fully_shard", (*COLLECTIVES, "fully_shard")),
    ("conformance/distributed/", (*COLLECTIVES, "fsdp")),
    ("", ("all_reduce", "broadcast", "all_gather_into_tensor")),
)


def probe_failures(probes: str) -> dict[str, str]:
    """Return the failure of each probe by its name, or an empty text if the probe worked."""
    recorded = read_rows(Path(probes))
    ended = {row["name"]: "" if row["outcome"] == "works" else _reason(row) for row in recorded.rows}
    return ended | dict.fromkeys(recorded.missing, "its probe did not run")


def _reason(row: dict[str, Any]) -> str:
    return " ".join([row["outcome"], *row["says"].splitlines()[:1]])


def obstacle(nodeid: str, device: str, world_size: int, probe_failures: dict[str, str]) -> str:
    """Return why this test cannot run here, according to its probes, or "". A test without probes is tried."""
    path = nodeid.partition("::")[0]
    needs = next(needs for pattern, needs in _NEEDS if re.match(pattern, path))
    for operation in needs:
        probe = Probe(operation, device, backend_for(device), world_size)
        if why := probe_failures.get(probe.name):
            return f"{probe.name}: {why}"
    return ""


class Plugin:
    """Pytest plugin: marks tests as unavailable in each worker, and writes rows and progress in the controller."""

    def __init__(self, task: PhaseTask, reporter: Any) -> None:
        """`reporter` is pytest's terminal; None in a worker."""
        self._probe_failures = probe_failures(task.probes) if task.probes else {}
        self._reporter = reporter
        self._rows = None if reporter is None else Rows(task)
        self._planned: set[str] = set()
        self._done: dict[str, str] = {}
        self._tell_at = 0.0

    # Runs last, because pytest groups the tests by their session-wide parameters.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if _has_gpu_ranks(_params_of(item)) and item.get_closest_marker("deadline") is None:
                # Collectives pass through the host, and ranks wait for their turn on the GPU.
                item.add_marker(pytest.mark.deadline(_TIMES_WITH_RANKS * item.config.option.deadline))
        items.sort(key=lambda item: stage_of(item.nodeid, "device" in _params_of(item)))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        params = _params_of(item)
        if "device" not in params or "world_size" not in params:
            return
        if why := obstacle(item.nodeid, params["device"], params["world_size"], self._probe_failures):
            unavailable(why)

    # Runs last, when the fixtures exist.
    @pytest.hookimpl(trylast=True, specname="pytest_runtest_setup")
    def start_ranks(self, item: pytest.Item) -> None:
        """Start the ranks before the test's deadline begins, because a dozen workers start theirs at the same time."""
        pool = getattr(item, "funcargs", {}).get("rank_pool")
        if pool is not None:
            with contextlib.suppress(PoolBroken):  # the test raises it again
                pool.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._plan(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._plan([item.nodeid for item in session.items])

    def _plan(self, ids: list[str]) -> None:
        """Write the collected tests once, although each worker collects the same tests."""
        if self._rows is not None and (new := [name for name in ids if name not in self._planned]):
            self._planned.update(new)
            self._rows.plan(new)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        judgement: Any = dict(report.user_properties).get("conformance")
        if self._rows is None or not (judgement or report.failed):
            return
        judged: dict[str, Any] = {**(judgement or {"reason": str(report.longrepr)})}
        outcome = judged.pop("outcome", "crash")
        if self._done.get(report.nodeid) in RED:  # first red outcome, like in the judge's report
            return
        self._done[report.nodeid] = outcome
        self._rows.write(report.nodeid, outcome, red=outcome in RED, **judged)
        if time.monotonic() >= self._tell_at:
            self._tell()

    def pytest_sessionfinish(self) -> None:
        self._tell()

    def _tell(self) -> None:
        """Print progress on the terminal, past pytest's capture, on a separate line among pytest's dots."""
        if self._reporter is not None:
            self._tell_at = time.monotonic() + _TELL_EVERY_S
            red = sum(outcome in RED for outcome in self._done.values())
            self._reporter.write_line(
                f"\n{PROGRESS}{len(self._done)} of {len(self._planned)} tests, {red} red"
            )


def _has_gpu_ranks(params: dict[str, Any]) -> bool:
    return params.get("device") == "cuda" and "world_size" in params


def _params_of(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = None
    if not hasattr(config, "workerinput"):
        reporter = config.pluginmanager.get_plugin("terminalreporter")
    task = PhaseTask.of_word(os.environ[VARIABLE])
    config.pluginmanager.register(Plugin(task, reporter), "tandem-gpu")
