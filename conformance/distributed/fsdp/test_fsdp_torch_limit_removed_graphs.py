"""Graphs that were built before a step: backward raises if it would read other weights than forward did."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from conformance.distributed.fsdp import graph_cases
from conformance.distributed.fsdp.test_fsdp_torch_limit_removed_writes import any_of, as_without_sharding
from conformance.distributed.fsdp.twins import RankOutcomes, Twins, Wrapping, each_strategy, each_wrapping
from conformance.distributed.fsdp.written_cases import Does, Forked, written, written_without_sharding
from conformance.judge.clauses import clause

refused = clause("distributed.fsdp.fsdp_torch_limit_removed.graphs_of_former_weights")
deviates = pytest.mark.deviation("fsdp.graphs_of_former_weights")


@refused
@deviates
@each_wrapping
@pytest.mark.parametrize("makes", [Forked, graph_cases.Parted])
@any_of(
    graph_cases.stepped_between,
    graph_cases.stepped_between_by_a_fused_optimizer,
    graph_cases.evaluated_between,
)
def test_backward_after_weight_change_is_refused(
    twins: Twins, does: Does, makes: type[nn.Module], wrapping: Wrapping
) -> None:
    """Every rank raises autograd's error for unsharded parameters. torch fails in more than one way."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as without_sharding:
        written_without_sharding(graph_cases.stepped_between, 1, makes)
    expected = _without_versions_and_types(str(without_sharding.value))

    def is_refused(outcomes: RankOutcomes) -> bool:
        return all(
            outcome.raised is not None
            and outcome.raised.kind is RuntimeError
            and _without_versions_and_types(outcome.raised.text) == expected
            for outcome in outcomes
        )

    twins.deviate(written, does=does, makes=makes, **wrapping, we_do=is_refused, may_agree=True)


def _without_versions_and_types(text: str) -> str:
    """Remove versions from the text, and the types of tensors, which name their device."""
    return re.sub(r"\[[\w.]+ \[", "[[", re.sub(r"version \d+", "version", text))


@refused
@deviates
@each_wrapping
@pytest.mark.parametrize(
    ("does", "makes"),
    [
        (graph_cases.goes_on_after_the_error, Forked),
        # A step of other parameters does no harm.
        (graph_cases.stepped_elsewhere, graph_cases.Parted),
    ],
    ids=lambda function: function.__name__,
)
def test_training_goes_on(twins: Twins, does: Does, makes: Any, wrapping: Wrapping) -> None:
    we_do = as_without_sharding(does, twins.world_size, makes)
    twins.deviate(written, does=does, makes=makes, **wrapping, we_do=we_do, may_agree=True)


@clause("distributed.fsdp.fsdp_torch_limit_removed.steps_in_between")
@each_strategy
def test_step_of_parameters_unread_by_backward_is_harmless(twins: Twins, strategy: str) -> None:
    does, makes = graph_cases.stepped_what_is_not_read, graph_cases.PartlyRead
    outcomes = twins.of_subject(written, does=does, strategy=strategy, use_orig_params=True, makes=makes)
    assert as_without_sharding(does, twins.world_size, makes)(outcomes), outcomes
