"""pytest plugin with pools of ranks. Each test process keeps one pool for each world size and device."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator

import pytest
import torch

from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.ranks.pool import RankPool
from conformance.simulator import Unavailable, ensure_built

# Environment variable with pytest-xdist's id of the run. Without workers, cases need not take turns.
_RUN = "PYTEST_XDIST_TESTRUNUID"
Pools = dict[tuple[int, str], RankPool]


@pytest.fixture(scope="session")
def _warm_pools() -> Generator[Pools]:
    pools: Pools = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest, _warm_pools: Pools, subject: Library
) -> Generator[Callable[..., RankPool]]:
    """Function `ranks(world_size, device="cpu")` that returns a pool whose ranks have imported the subject.

    The test computes in one thread, like each rank. More threads would compete with the ranks for cores.
    """
    for pool in _warm_pools.values():
        pool.new_test()
    used: set[tuple[int, str]] = set()
    request.node.used_pools = used  # shown in the report

    def pool_of(world_size: int, device: str = "cpu") -> RankPool:
        key = (world_size, device)
        used.add(key)
        if key not in _warm_pools:
            warm_up = ("conformance.ranks.process:load", {"library": subject.spec})
            _warm_pools[key] = RankPool(
                world_size, device=device, warm_up=warm_up, turns=os.environ.get(_RUN)
            )
        return _warm_pools[key]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield pool_of
    # Another number means that a library has changed it, which the check of torch's state must report.
    if torch.get_num_threads() == 1:
        torch.set_num_threads(threads)


@pytest.fixture
def rank_pool(ranks: Callable[..., RankPool], world_size: int, device: str) -> RankPool:
    """The pool for the test's world size and device."""
    return ranks(world_size, device)


def require_simulator() -> None:
    """Build the simulated device if needed, or report the test as *unavailable* if it cannot be built."""
    try:
        ensure_built()
    except Unavailable as error:
        unavailable(str(error))
