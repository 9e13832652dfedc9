"""Pools for tests; a pytest plugin. Each test process has one warm pool for each world size and device."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator

import pytest
import torch

from conformance.judge.library import Library
from conformance.ranks.pool import RankPool

# What pytest-xdist calls the run that its workers have in common; without workers nobody need take turns.
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
    """`ranks(world_size, device="cpu")`: the warm pool of that size, whose ranks have imported the subject.

    The test computes in one thread, as each rank does: more would stand in their way, and in each other's.
    """
    for pool in _warm_pools.values():
        pool.new_test()
    asked: set[tuple[int, str]] = set()
    request.node.pools_asked = asked  # where the report says that the test ran

    def pool_of(world_size: int, device: str = "cpu") -> RankPool:
        key = (world_size, device)
        asked.add(key)
        if key not in _warm_pools:
            warm_up = ("conformance.ranks.cases:load", {"library": subject.spec})
            _warm_pools[key] = RankPool(
                world_size, device=device, warm_up=warm_up, turns=os.environ.get(_RUN)
            )
        return _warm_pools[key]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield pool_of
    if torch.get_num_threads() == 1:  # else a library has changed it, which the test is to be told
        torch.set_num_threads(threads)


@pytest.fixture
def rank_pool(ranks: Callable[..., RankPool], world_size: int, device: str) -> RankPool:
    """The pool for the world size and device that the test runs with."""
    return ranks(world_size, device)
