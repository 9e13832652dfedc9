"""Graphs that were built before a step: refused where backward would read other weights than forward did."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from conformance.distributed.fsdp import graph_cases
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed import Seen
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed_writes import (
    both_kinds,
    each_strategy,
    is_as_without_sharding,
    probe_of,
)
from conformance.distributed.fsdp.written_cases import Forked, written_without_sharding
from conformance.judge.clauses import clause
from conformance.judge.deviations import DeviationJudge
from conformance.judge.library import Library
from conformance.ranks import RankPool

refused = clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
deviates = pytest.mark.deviation("fsdp.graphs_of_former_weights")


def judge(deviation: DeviationJudge, pool: RankPool, we_do: Callable[[Seen], bool], **asked: Any) -> None:
    """torch has more than one way to fail."""
    deviation.judge(probe_of(pool, **asked), we_do=we_do, may_agree=True)


@refused
@deviates
@both_kinds
@each_strategy
@pytest.mark.parametrize("makes", [Forked, graph_cases.Parted])
@pytest.mark.parametrize(
    "does",
    [
        graph_cases.stepped_between,
        graph_cases.stepped_between_by_a_fused_optimizer,
        graph_cases.evaluated_between,
    ],
    ids=lambda does: does.__name__,
)
def test_a_backward_through_other_weights_is_refused(
    deviation: DeviationJudge,
    rank_pool: RankPool,
    does: Any,
    makes: type[nn.Module],
    strategy: str,
    use_orig_params: bool,
) -> None:
    """In the words that autograd has for it without sharding, on every rank."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as without_sharding:
        written_without_sharding(graph_cases.stepped_between, 1, makes)
    expected = _without_versions(str(without_sharding.value))

    def is_refused(seen: Seen) -> bool:
        return all(
            outcome.raised is not None
            and outcome.raised.kind is RuntimeError
            and _without_versions(outcome.raised.text) == expected
            for outcome in seen
        )

    asked = {"does": does, "makes": makes, "strategy": strategy, "use_orig_params": use_orig_params}
    judge(deviation, rank_pool, is_refused, **asked)


def _without_versions(text: str) -> str:
    return re.sub(r"version \d+", "version", text)


@refused
@deviates
@both_kinds
@each_strategy
def test_training_goes_on_after_the_error(
    deviation: DeviationJudge, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    does = graph_cases.goes_on_after_the_error
    judge(
        deviation,
        rank_pool,
        lambda seen: is_as_without_sharding(seen, does),
        does=does,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@refused
@deviates
@both_kinds
@each_strategy
def test_a_step_of_other_parameters_is_no_matter(
    deviation: DeviationJudge, rank_pool: RankPool, strategy: str, use_orig_params: bool
) -> None:
    does, makes = graph_cases.stepped_elsewhere, graph_cases.Parted
    judge(
        deviation,
        rank_pool,
        lambda seen: is_as_without_sharding(seen, does, makes=makes),
        does=does,
        makes=makes,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@clause("distributed.fsdp.fsdp_torch_limit_removed.steps_in_between")
@each_strategy
def test_a_step_of_parameters_that_backward_does_not_read_is_no_matter(
    subject: Library, rank_pool: RankPool, strategy: str
) -> None:
    does, makes = graph_cases.stepped_what_is_not_read, graph_cases.Normed
    seen = probe_of(rank_pool, does, strategy, use_orig_params=True, makes=makes)(subject)
    assert is_as_without_sharding(seen, does, makes=makes), seen
