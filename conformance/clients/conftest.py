"""The two sides of a training: ranks over torch, and ranks over the subject."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from conformance.clients.sides import Sides
from conformance.clients.taking_place import drop_in_of
from conformance.judge.judgement import unavailable
from conformance.judge.library import Library
from conformance.ranks import RankPool

_LIBRARIES = ("accelerate", "transformers", "lightning", "peft", "bitsandbytes", "torchao")


@pytest.fixture(scope="session")
def _sides() -> Iterator[dict[str, RankPool]]:
    pools: dict[str, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def sides(
    request: pytest.FixtureRequest, _sides: dict[str, RankPool], subject: Library, reference: Library
) -> Sides:
    """Two ranks over each library. They are created once, because their imports take half a minute."""
    if missing := [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]:
        unavailable(f"no {', '.join(missing)}: ci/test --clients, or pip install -e '.[clients]'")
    drop_in_of(subject)
    request.node.used_pools = {(2, "cpu")}  # shown in the report
    return Sides(_sides, reference, subject)
