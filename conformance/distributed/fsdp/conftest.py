"""Fixtures that hand tests both libraries on ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest

from conformance.distributed.fsdp.scenes.twins import PlainTwins, Twins, TwinsOf, assert_limit
from conformance.judge.files.rows import all_reference_limits
from conformance.judge.library import Library
from conformance.ranks import RankPool


@pytest.fixture
def twins_of(
    request: pytest.FixtureRequest, reference: Library, subject: Library, ranks: Callable[..., RankPool]
) -> TwinsOf:
    has_row = request.node.get_closest_marker("deviation") is not None
    return TwinsOf(reference, subject, ranks, request.getfixturevalue("deviation") if has_row else None)


@pytest.fixture
def twins(twins_of: TwinsOf, world_size: int, device: str) -> Twins:
    """Rank comparison in the world size and on the device of the test."""
    return twins_of(world_size, device)


@pytest.fixture
def plain_twins_of(twins_of: TwinsOf) -> TwinsOf:
    return replace(twins_of, kind=PlainTwins)


@pytest.fixture
def plain_twins(plain_twins_of: TwinsOf, world_size: int, device: str) -> PlainTwins:
    """Rank comparison of programs that call `fully_shard`, in the world size and on the device of the test."""
    return plain_twins_of(world_size, device)


@pytest.fixture
def cpu_twins(twins_of: TwinsOf, world_size: int) -> Twins:
    """Rank comparison in the world size of the test, on the CPU."""
    return twins_of(world_size)


@pytest.fixture
def torch_cannot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return `assert_limit` for the row of `reference_limits.toml` that the test's mark `reference_limit` names."""
    row = all_reference_limits()[request.node.get_closest_marker("reference_limit").args[0]]
    return functools.partial(assert_limit, row)
