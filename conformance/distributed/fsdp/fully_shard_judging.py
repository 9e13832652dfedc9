"""Probes of `fully_shard`, functions of a `Site`, on the ranks of both libraries: compared, or judged by a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.distributed.fsdp.judging import assert_ranks_agree, outcomes
from conformance.distributed.fsdp.twins import Seen, Twins, values_of
from conformance.judge.deviations import does_as
from conformance.judge.library import Library
from conformance.judge.outcome import Outcome

Asks = Callable[..., Any]


def seen_by(twins: Twins, library: Library, asks: Asks, **arguments: Any) -> Seen:
    return outcomes(twins.pool, library, "fully_shard_construct_cases:probe", asks=asks, **arguments)


def assert_agree(twins: Twins, asks: Asks, *, may_raise: bool = False, **arguments: Any) -> Seen:
    """Judge rank by rank; gives what the subject's saw."""
    expected, actual = (
        seen_by(twins, library, asks, **arguments) for library in (twins.reference, twins.subject)
    )
    assert_ranks_agree(expected, actual)
    if not may_raise:
        values_of(actual)
    return actual


def deviate(
    twins: Twins,
    asks: Asks,
    *,
    we_do: Callable[[Seen], bool],
    torch_does: Callable[[Seen], bool] | None = None,
    may_agree: bool = False,
    **arguments: Any,
) -> None:
    """Judge by the row that the test names, as `DeviationJudge.judge` does."""
    twins.judge(
        lambda library: seen_by(twins, library, asks, **arguments),
        we_do=we_do,
        torch_does=torch_does,
        may_agree=may_agree,
    )


def deviate_by_hand(twins: Twins, expected: Outcome, asks: Asks, **arguments: Any) -> None:
    """By a row: we do on every rank as one process does without sharding."""
    deviate(twins, asks, we_do=lambda seen: all(does_as(expected, each) for each in seen), **arguments)
