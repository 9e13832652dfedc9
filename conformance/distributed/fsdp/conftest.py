"""Fixtures that hand tests both libraries on ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.distributed.fsdp.twins import Twins
from conformance.judge.library import Library
from conformance.ranks import RankPool


@pytest.fixture
def twins_of(
    request: pytest.FixtureRequest, reference: Library, subject: Library, ranks: Callable[..., RankPool]
) -> Callable[..., Twins]:
    """`twins_of(world_size, device="cpu")`, whatever world sizes are asked for."""
    has_row = request.node.get_closest_marker("deviation") is not None
    deviation = request.getfixturevalue("deviation") if has_row else None
    return lambda world_size, device="cpu": Twins(reference, subject, ranks(world_size, device), deviation)


@pytest.fixture
def twins(twins_of: Callable[..., Twins], world_size: int, device: str) -> Twins:
    """On the world size and the device that the test runs with."""
    return twins_of(world_size, device)


@pytest.fixture
def cpu_twins(twins_of: Callable[..., Twins], world_size: int) -> Twins:
    """On the world size that the test runs with."""
    return twins_of(world_size)
